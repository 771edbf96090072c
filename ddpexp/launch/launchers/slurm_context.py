"""This process inside Slurm: where it runs, the step's rendezvous key, other jobs of the run, requeueing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from ddpexp.errors import RefusedError, StoppedError
from ddpexp.launch.rendezvous.environment import is_started_by_srun
from ddpexp.system.job_schedulers.slurm import RUNNING, SLURM
from ddpexp.system.programs import find, located
from ddpexp.system.terminal import print_message

# Variables of an allocation on the tasks that it was made for; srun would apply them to ddpexp's one task per node.
OF_OTHER_TASKS = (
    "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_TRES",
    "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_CPU_BIND",
    "SLURM_GPU_BIND", "SLURM_TRES_BIND", "SLURM_DISTRIBUTION",
)  # fmt: skip


def requeue_job(error: StoppedError) -> str:
    """Requeue the job, unless it would only repeat the same steps; return how that ended.

    Slurm may kill this process before scontrol has returned: a line before says what is done.
    """
    job_id = SLURM.job_id()
    if not error.saved or error.step is None or error.step <= (error.began or 0):
        return f"job {job_id} is not requeued: it has saved no step since it started, and would do the same again"
    try:
        argv = [located("scontrol"), "requeue", SLURM.unique_job_id() or ""]
        print_message(f"ddpexp: requeueing job {job_id}")
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace")
    except OSError as problem:
        return f"job {job_id} is not requeued: scontrol: {problem.strerror}"
    if done.returncode:
        return f"job {job_id} is not requeued: {' '.join(done.stderr.split()) or done.returncode}"
    return f"job {job_id} is requeued"


def where(
    environ: Mapping[str, str] = os.environ, pid: int | None = None, has_terminal: Callable[[str], bool] | None = None
) -> Literal["login", "allocation", "step"]:
    """Return where this process runs: on a login node, inside an allocation, or as a task of a step.

    A command that is typed in a shell of a step is inside an allocation.
    """
    if "SLURM_JOB_ID" not in environ:
        return "login"
    return "step" if is_started_by_srun(environ, pid, has_terminal) else "allocation"


def check_not_running(run: Path) -> None:
    """Refuse a run directory that another job is using, such as the same script submitted twice."""
    others = {path.stem.removeprefix("slurm-") for path in run.glob("slurm-*.log")} - {
        SLURM.job_id(),
        os.environ["SLURM_JOB_ID"],
    }
    for job_id, job_state in SLURM.states(sorted(others)).items():
        if job_state.name in RUNNING:
            raise RefusedError(
                f"job {job_id} still runs in {run}",
                suggestion=f"Wait for its end, or end it with {SLURM.cancel_command([job_id])}.",
            )


def check_lives(job_id: str | None) -> None:
    """Check that the job of this shell's variables has not ended. Raises: RefusedError."""
    if job_id is not None and SLURM.is_over(job_id):
        raise RefusedError(
            f"SLURM_JOB_ID={os.environ['SLURM_JOB_ID']} is exported here, and job {job_id} has ended",
            suggestion="Unset SLURM_JOB_ID to submit a new one, or allocate nodes with salloc first.",
        )


def unused_components(environ: Mapping[str, str]) -> str | None:
    """Return a warning for a heterogeneous allocation, of which a step of one command takes the first component."""
    size = environ.get("SLURM_HET_SIZE", "1")
    if not size.isdecimal() or int(size) < 2:
        return None
    command = "python -m ddpexp ... launcher=slurm"
    return (
        f"this allocation has {size} components, and launcher=slurm takes the first of them alone. To use them all, "
        f"start the ranks with srun: srun {' : '.join([command] * int(size))}."
    )


def step_key() -> str:
    """Return a key that all tasks of this start of a step share, for their rendezvous."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return "slurm " + ".".join(os.environ.get(name, "0") for name in names)


def check_programs(required: Sequence[str], to_wait: Sequence[str]) -> None:
    """Check that Slurm's programs are on this machine; `to_wait` are needed only by launcher.wait=true.

    Raises:
        RefusedError: one is not.
    """
    programs = (*required, *to_wait)
    missing = [program for program in programs if find(program) is None]
    if not missing:
        return
    if len(missing) == len(programs):
        raise RefusedError(
            f"needs {missing[0]}, which this machine does not have: it is not in a Slurm cluster",
            key="launcher",
            value="slurm",
            suggestion="Use launcher=spawn.",
        )
    present = next(program for program in programs if program not in missing)
    without_wait = ", or use launcher.wait=false" if set(missing) <= set(to_wait) else ""
    raise RefusedError(
        f"needs all of Slurm's commands: {present} is on this machine, and {', '.join(missing)} is not, as in a "
        "container with only a part of Slurm",
        key="launcher",
        value="slurm",
        suggestion=f"Install them{without_wait}.",
    )
