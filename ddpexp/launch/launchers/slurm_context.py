"""This process inside Slurm: where it runs, the step's rendezvous key, other jobs of the run, requeueing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from ddpexp.errors import RefusedError, StoppedError
from ddpexp.system.job_schedulers.slurm import RUNNING, SLURM
from ddpexp.system.programs import located

# Variables of an allocation on the tasks that it was made for; srun would apply them to ddpexp's one task per node.
OF_OTHER_TASKS = (
    "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_TRES",
    "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_CPU_BIND",
    "SLURM_GPU_BIND", "SLURM_TRES_BIND", "SLURM_DISTRIBUTION",
)  # fmt: skip


def requeue_job(error: StoppedError) -> str:
    """Requeue the job, unless it would only repeat the same steps; return what was done."""
    job_id = SLURM.job_id()
    if not error.saved or error.step is None or error.step <= (error.began or 0):
        return f"job {job_id} is not requeued: it has saved no step since it started, and would do the same again"
    try:
        argv = [located("scontrol"), "requeue", SLURM.unique_job_id() or ""]
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

    A batch script has SLURM_PROCID like a task of srun, but no step. A shell that `srun --pty` opened is itself a task,
    but a command that is run in it is not: it is inside an allocation. Only then the task is another process and there
    is a terminal; SLURM_PTY_PORT is no evidence, since steps that are started in that shell inherit it.
    """
    if "SLURM_JOB_ID" not in environ:
        return "login"
    step = environ.get("SLURM_STEP_ID")
    if step is None or not step.isdigit() or int(step) >= 0xFFFFFFF0:  # the batch script's, the interactive step's
        return "allocation"
    me, task = str(os.getpid() if pid is None else pid), environ.get("SLURM_TASK_PID", "")
    if task != me and any(map(has_terminal or _has_terminal, (me, task))):
        return "allocation"
    return "step"


def _has_terminal(pid: str) -> bool:
    """Return whether a process has a controlling terminal. Source: proc(5), tty_nr."""
    try:
        return Path("/proc", pid, "stat").read_text().rsplit(")", 1)[1].split()[4] != "0"
    except (OSError, IndexError):
        return False  # it has ended, or is in another container


def check_not_running(run: Path) -> None:
    """Refuse a run directory that another job is using, such as the same script submitted twice."""
    others = {path.stem.removeprefix("slurm-") for path in run.glob("slurm-*.log")} - {
        SLURM.job_id(),
        os.environ["SLURM_JOB_ID"],
    }
    for job_id, job_state in SLURM.states(sorted(others)).items():
        if job_state.name in RUNNING:
            raise RefusedError(
                f"job {job_id} still runs in {run}: wait for its end, or end it with {SLURM.cancel_command([job_id])}."
            )


def step_key() -> str:
    """Return a key that all tasks of this start of a step share, for their rendezvous."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return "slurm " + ".".join(os.environ.get(name, "0") for name in names)
