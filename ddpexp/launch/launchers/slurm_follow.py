"""Follow a submitted Slurm job: show its output until it ends."""

from __future__ import annotations

import time
from pathlib import Path

from ddpexp.errors import EXIT_DONE, EXIT_FAILED, StoppedError
from ddpexp.launch.workers.rank_log import Log
from ddpexp.system.job_schedulers.slurm import SLURM
from ddpexp.system.terminal import Terminal, print_message

_POLL_SECONDS = 1.0


def leave_running(job_id: str, error: StoppedError) -> int:
    """Report that the job keeps running after a signal to this command; return the exit code."""
    print_message(f"ddpexp: job {job_id} keeps running; cancel it with {SLURM.cancel_command([job_id])}")
    return error.exit_code


def follow_job(job_id: str, output: Path) -> tuple[str, int]:
    """Show the job's output until it has ended; return its state and exit code."""
    terminal = Terminal()
    log: Log | None = None
    try:
        while True:
            state, code = SLURM.state(job_id)
            if log is None and output.is_file():
                log = Log.reading(output)
            for line in log.new_lines(last=state.is_over is True) if log is not None else ():
                terminal.line(line)
            if state.is_over:
                return state.name, EXIT_FAILED if code == EXIT_DONE and state.name != "COMPLETED" else code
            time.sleep(_POLL_SECONDS)
    finally:
        terminal.close()
        if log is not None:
            log.close()
