"""Follow a submitted Slurm job: show its output until it ends."""

from __future__ import annotations

import json
import time
from pathlib import Path

from ddpexp.errors import EXIT_DONE, EXIT_FAILED, EXIT_REFUSED, Failure, StoppedError
from ddpexp.launch.workers.rank_log import Log
from ddpexp.system.job_schedulers.base import FORGOTTEN, JobState
from ddpexp.system.job_schedulers.slurm import SLURM
from ddpexp.system.terminal import Terminal, print_message
from ddpexp.system.text import first_few

_POLL_SECONDS, _SILENCE_SECONDS = 1.0, 60.0


def leave_running(job_id: str, error: StoppedError) -> int:
    """Report that the job keeps running after a signal to this command; return the exit code."""
    print_message(f"ddpexp: job {job_id} keeps running; cancel it with {SLURM.cancel_command([job_id])}")
    return error.exit_code


def of_unstarted(code: int) -> int:
    """Return the exit code for a step whose command never began.

    2 is srun's code for a program that is not there, and may be that of a line of `launcher.setup`; it stands for a
    refusal by ddpexp.
    """
    return EXIT_FAILED if code == EXIT_REFUSED else code


class Silence:
    """A message, once for each time that Slurm has not reported the state of jobs for a minute, with the reason."""

    def __init__(self, *job_ids: str) -> None:
        """Name the jobs in the message."""
        self._jobs = f"job{'s' if len(job_ids) > 1 else ''} {first_few(job_ids)}"
        self._since: float | None = None
        self._said = False

    def note(self, state: JobState) -> None:
        """Take note of an answer."""
        if state.is_over is not None:
            self._since, self._said = None, False
            return
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if not self._said and now - self._since > _SILENCE_SECONDS:
            self._said = True
            print_message(
                f"ddpexp: Slurm has not reported the state of {self._jobs} for {now - self._since:.0f} s: "
                f"{state.reason}. This command keeps asking; Ctrl-C ends the command alone, and nothing in Slurm."
            )


def follow_job(job_id: str, output: Path) -> tuple[str, int]:
    """Show the job's output until it has ended; return its state and exit code."""
    terminal = Terminal()
    log: Log | None = None
    silence = Silence(job_id)
    try:
        while True:
            state, code = SLURM.state(job_id)
            silence.note(state)
            if state.is_over is None and status(output.parent) in ("done", "failed"):
                state = JobState(FORGOTTEN, True)  # reported by the job itself
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


def refusal(run: Path) -> Failure | None:
    """Return why the job of a run directory was refused; None if it was not."""
    try:
        failure = Failure(**json.loads((run / "error.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return failure if failure.refused else None


def status(run: Path) -> str | None:
    """Return the status in a run directory's result.json, or None if there is none."""
    try:
        recorded: str = json.loads((run / "result.json").read_text())["status"]
        return recorded
    except (OSError, ValueError):
        return None
