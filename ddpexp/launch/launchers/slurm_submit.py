"""Submit a job's script with sbatch, and follow the job if the command waits for it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from ddpexp.errors import EXIT_DONE, EXIT_FAILED, EXIT_REFUSED, Failure, RefusedError, StoppedError
from ddpexp.launch import Failed, Job
from ddpexp.launch.launchers.slurm_follow import follow_job, leave_running, of_unstarted, refusal, status
from ddpexp.launch.launchers.slurm_text import checked_script, log_name
from ddpexp.system.files import write_data
from ddpexp.system.job_schedulers.base import FORGOTTEN
from ddpexp.system.job_schedulers.slurm import SLURM
from ddpexp.system.process import deferred_stop_signals
from ddpexp.system.terminal import print_message

_SCRIPT = "job.sbatch"


def submit_job(job: Job, script: Callable[[Path], str], wait: bool) -> int:
    """Create the run directory, write and submit its script; return the exit code.

    `script` returns the text for a run directory. With `wait` this command shows the job's output until it has ended.

    Raises:
        RefusedError: the job, or Slurm, refuses. StoppedError: a signal came before the job had an id.
    """
    portable = job.require_portable()
    portable.prepare()
    run = portable.create()
    path = run / _SCRIPT
    before = path.read_bytes() if path.is_file() else None  # of a run that is resumed
    write_data(path, checked_script(script(run), path.name))
    job_id = ""
    try:
        with deferred_stop_signals():  # nothing else knows the job's id until it is recorded
            job_id = SLURM.submit(path)
            portable.submitted(job_id=job_id)
    except RefusedError:
        if before is not None:
            write_data(path, before)
        else:
            path.unlink()
        raise
    except StoppedError as error:
        if not job_id:
            raise
        return leave_running(job_id, error)
    output = run / log_name(run, job_id)
    print_message(f"submitted job {job_id}  run directory {os.path.relpath(run)}", sys.stdout)
    if not wait:
        log = shlex.quote(os.path.relpath(output))
        cancel = SLURM.cancel_command([job_id])
        print_message(f"follow it: tail -F {log}    queue: squeue -j {job_id}    end it: {cancel}", sys.stdout)
        return EXIT_DONE
    return _wait(job, job_id, run, output)


def _wait(job: Job, job_id: str, run: Path, output: Path) -> int:
    """Show the job's output, record its end if it could not itself, and return its exit code."""
    try:
        state, code = follow_job(job_id, output)
    except StoppedError as error:
        return leave_running(job_id, error)
    if state == FORGOTTEN:  # it ended long ago, while this command was suspended
        return EXIT_DONE if status(run) == "done" else EXIT_FAILED
    if code and status(run) == "submitted":
        code = of_unstarted(code)
        text = f"job {job_id} ended as {state} before its command began: see {output}"
        job.lifecycle.end(Failed(Failure.of_command("SlurmError", text, exit_code=code)))
    elif code == EXIT_REFUSED and refusal(run) is not None:  # the job's output was shown here, like any refusal
        job.require_portable().withdraw([run / _SCRIPT, output])
    if code:
        print_message(f"ddpexp: job {job_id} ended as {state}")
    return code
