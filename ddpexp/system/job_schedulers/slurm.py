"""Slurm as a job scheduler, through its own commands: sbatch, squeue, scontrol."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ddpexp.errors import EXIT_DONE, EXIT_FAILED, RefusedError
from ddpexp.system.job_schedulers.base import FORGOTTEN, UNKNOWN, JobState
from ddpexp.system.programs import environ_of_others, find, located
from ddpexp.system.terminal import print_message
from ddpexp.system.text import first_few

RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED")
_OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
         "TIMEOUT", FORGOTTEN)  # fmt: skip
_ANSWER_SECONDS, _SINFO_SECONDS = 15.0, 5.0
_SINFO_BARS = 6  # between the columns that are asked for
_NAMED, _ARRAY_INDEX = 8, "SBATCH_ARRAY_INX"
_OF_A_JOB = ("SLURM_JOB", "SLURM_STEP", "SLURM_TASK", "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_NODELIST",
             "SLURM_NNODES", "SLURM_SUBMIT_", "SLURMD_NODENAME")  # fmt: skip
_OF_TASKS = (
    "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_CPUS_",
    "SRUN_CPUS_", "SLURM_CPU_", "SLURM_MEM_", "SLURM_GPU", "SLURM_TRES", "SLURM_HINT", "SLURM_TIMELIMIT",
    "SLURM_DISTRIBUTION", "SLURM_THREADS_PER_CORE", "SLURM_CORE_SPEC", "SLURM_THREAD_SPEC", "SLURM_EXCLUSIVE",
    "SLURM_OVERCOMMIT", "SLURM_OVERLAP", "SLURM_HET_", "SLURM_STEP_", "SLURM_WHOLE",
)  # fmt: skip
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT", "SLURM_DEBUG")
_ARRAY_SIZE = 1001  # Slurm's default. Source: slurm.conf(5), MaxArraySize


@dataclass(frozen=True)
class Nodes:
    """Equal nodes of a partition, and its limits for a job; None where it has none. Units: memory in MB."""

    partition: str
    count: int
    cores: int
    memory: int
    gpus: Mapping[str, int]  # by type; "" without one
    seconds: int | None = None
    most_nodes: int | None = None


@dataclass(frozen=True)
class SlurmScheduler:
    """Slurm, by its own commands; implements `JobScheduler`."""

    name: str = "slurm"
    label: str = "Slurm"

    def job_id(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """Return the id of this process's job in the form that users know: 123, or 123_4 for an array task."""
        names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
        if all(name in environ for name in names):
            return "_".join(environ[name] for name in names)
        return environ.get("SLURM_JOB_ID")

    def unique_job_id(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """Return an id of this process's job that is unambiguous for Slurm.

        Every array task has a job id of its own, except one, whose id is the whole array's: for it the form 123_4 is
        returned. A job submitted from inside an array task inherits that task's array variables, so they alone do not
        identify it.
        """
        number = environ.get("SLURM_JOB_ID")
        return self.job_id(environ) if number == environ.get("SLURM_ARRAY_JOB_ID") else number

    def is_job_id(self, text: object) -> bool:
        """Return whether the text is the id of a job, 123, or of an array task, 123_4."""
        return isinstance(text, str) and re.fullmatch(r"\d+(_\d+)?", text, re.ASCII) is not None

    def is_over(self, job_id: str) -> bool | None:
        """Return whether a job has ended; None: Slurm is not installed, or does not answer."""
        return self.state(job_id)[0].is_over

    def states(self, job_ids: Iterable[str]) -> dict[str, JobState]:
        """Query the states of many jobs and array tasks in one call: PENDING, RUNNING, COMPLETED, FAILED and so on.

        FORGOTTEN: ended long ago (MinJobAge of the cluster, five minutes by default). UNKNOWN: Slurm is not installed
        or does not answer, or the text is not a job id.
        """
        requested = list(job_ids)
        jobs = {text.partition("_")[0] for text in requested if self.is_job_id(text)}
        if not jobs:
            return dict.fromkeys(requested, _state(UNKNOWN))
        argv = [
            "squeue",
            "--noheader",
            "--array",
            "--states=all",
            "--format=%i %A %T",
            f"--jobs={','.join(sorted(jobs))}",
        ]
        done = _ask(argv)
        if done.returncode and "Invalid job id" not in done.stderr:
            return dict.fromkeys(requested, _unknown(done))
        rows = [line.split() for line in done.stdout.splitlines()]
        # An array task has a job id of its own too, as %A.
        by_id = {row[1]: row[2] for row in rows} | {row[0]: row[2] for row in rows}
        return {text: _state(by_id.get(text, FORGOTTEN) if self.is_job_id(text) else UNKNOWN) for text in requested}

    def state(self, job_id: str) -> tuple[JobState, int]:
        """Query a job's state and exit code; scontrol works without an accounting database.

        Each line is matched by its first key: text that users choose, such as the job's name, never starts a line.
        """
        done = _ask(["scontrol", "show", "job", job_id])
        job_state = re.search(r"^ +JobState=(\w+)", done.stdout, re.MULTILINE)
        code = re.search(r"^ +Requeue=.* ExitCode=(\d+):(\d+)", done.stdout, re.MULTILINE)
        if done.returncode or job_state is None:
            # The second message, on standard output, is for a task whose array Slurm still knows.
            gone = "Invalid job id" in done.stderr or re.match(r"Job \d+_\d+ not found", done.stdout)
            return _state(FORGOTTEN) if gone else _unknown(done), EXIT_DONE
        if code is None:
            return _state(job_state[1]), EXIT_DONE
        return _state(job_state[1]), 128 + int(code[2]) if int(code[2]) else int(code[1])

    def submit(self, script: Path) -> str:
        """Submit a script and return the job's id.

        Raises:
            RefusedError: Slurm rejects it; the message has Slurm's reason. OSError: there is no sbatch.
        """
        environ, left_out = environ_of_a_job(os.environ)
        _report_left_out(*(name for name in left_out if name != _ARRAY_INDEX))
        argv = [located("sbatch"), "--parsable", str(script)]
        # A new session: otherwise Ctrl-C could end sbatch after the submission but before it has printed the job's id.
        done = subprocess.run(
            argv,
            env=environ_of_others(environ),
            capture_output=True,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        if done.returncode:
            raise RefusedError(
                f"sbatch rejected the job: {' '.join(done.stderr.split()) or done.returncode}",
                suggestion="launcher.dry_run=true prints its script.",
            )
        if done.stderr.strip():  # messages of the cluster
            print_message(done.stderr.rstrip())
        return done.stdout.strip().split(";")[0]

    def restart_count(self) -> int | None:
        """Return how many times Slurm has requeued this process's job; None if never."""
        text = os.environ.get("SLURM_RESTART_COUNT")
        return int(text) if text is not None and text.isdecimal() else None

    def cancel_command(self, job_ids: Sequence[str]) -> str:
        """Return the command with which the user cancels jobs."""
        return f"scancel {' '.join(job_ids)}"


@cache  # once for all jobs of a sweep
def _report_left_out(*names: str) -> None:
    if names:
        shown = first_few(names, _NAMED)
        print_message(f"ddpexp: the job does not inherit {shown} of this shell, which describe other jobs or steps")


def environ_of_a_job(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the environment with which a new job is submitted, and the names that are left out.

    sbatch hands its environment on to the job, whose srun reads it: SLURM_MEM_PER_CPU of the submitting shell would
    contradict the job's own memory, and SLURM_CPU_BIND_LIST bind all ranks to the cores of another step. Variables that
    describe the tasks of a step are always left out, since ddpexp's own srun has its options from the configuration;
    Slurm's other variables are left out where the shell is, or was, inside a job: elsewhere they are the user's
    defaults.
    """
    was_in_a_job = any(name.startswith(_OF_A_JOB) for name in environ)
    left_out = [
        name
        for name in environ
        if name.startswith(_OF_TASKS)
        or name == _ARRAY_INDEX  # would override the script's own array directive
        or (was_in_a_job and name.startswith(("SLURM_", "SRUN_", "SLURMD_", "PMI_", "PMIX_")) and name not in _KEPT)
    ]
    return {name: value for name, value in environ.items() if name not in left_out}, sorted(left_out)


SLURM = SlurmScheduler()


def _state(name: str) -> JobState:
    return JobState(name, None if name == UNKNOWN else name in _OVER)


def _unknown(done: subprocess.CompletedProcess[str]) -> JobState:
    return JobState(UNKNOWN, None, " ".join(f"{done.args[0]}: {done.stderr or done.stdout}".split()))


def show_job(job_id: str, seconds: float | None = None) -> str | None:
    """Return what `scontrol show job` prints; None: Slurm is not installed, does not answer, or does not know it."""
    done = _ask(["scontrol", "show", "job", job_id], seconds)
    return None if done.returncode else done.stdout


@cache  # once for all jobs of a sweep
def nodes_of(partitions: str | None) -> tuple[Nodes, ...] | str:
    """Return the nodes of some partitions, with commas between them, or of the default one; or why they are unknown."""
    done = _ask(["sinfo", "--all", "--exact", "--noheader", "--format=%P|%D|%c|%m|%G|%l|%s"], _SINFO_SECONDS)
    if done.returncode:
        return " ".join(f"sinfo: {done.stderr or done.stdout}".split())
    return nodes_in(done.stdout, partitions)


def nodes_in(text: str, partitions: str | None) -> tuple[Nodes, ...] | str:
    """Return the nodes of partitions that sinfo writes; or why they are not known."""
    names = set(partitions.split(",")) if partitions else None
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == _SINFO_BARS]
    chosen = [row for row in rows if (row[0].rstrip("*") in names if names else row[0].endswith("*"))]
    if not chosen:
        others = ", ".join(dict.fromkeys(row[0].rstrip("*") for row in rows)) or "none"
        return f"sinfo names no nodes of {partitions or 'a default partition'}; partitions are {others}"
    try:
        return tuple(_nodes(*row) for row in chosen)
    except ValueError:
        return "the output of sinfo has an unknown form"


def _nodes(partition: str, count: str, cores: str, memory: str, gres: str, limit: str, size: str) -> Nodes:
    """Return the nodes of a line of sinfo. Source: sinfo(1), --format. Raises: ValueError."""
    gpus: dict[str, int] = {}
    for kind, number in re.findall(r"\bgpu:(?:([^:,()]+):)?(\d+)(?=[,(]|$)", gres):
        gpus[kind] = gpus.get(kind, 0) + int(number)
    most = size.rpartition("-")[2]
    return Nodes(
        partition=partition.rstrip("*"),
        count=int(count),
        cores=int(cores.rstrip("+")),
        memory=int(memory.rstrip("+")),
        gpus=gpus,
        seconds=seconds_of(limit),
        most_nodes=int(most) if most.isdecimal() else None,
    )


def seconds_of(text: str | int | None) -> int | None:
    """Return a time limit in seconds; None where there is none, or where the text is invalid and Slurm reports it.

    Source: sbatch(1), --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and so
    on.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", "" if text is None else str(text))
    if match is None:
        return None
    days, *numbers = (None if number is None else int(number) for number in match.groups())
    given = [number for number in numbers if number is not None]
    units = (3600, 60, 1) if days is not None or len(given) == 3 else (60, 1)
    seconds = (days or 0) * 86400 + sum(number * unit for number, unit in zip(given, units, strict=False))
    return seconds or None  # 0 means no limit


def array_size() -> int:
    """Return how many tasks an array may have on this cluster."""
    done = _ask(["scontrol", "show", "config"])
    limits = re.findall(r"^MaxArraySize\s*=\s*(\d+)|\bmax_array_tasks=(\d+)", done.stdout, re.MULTILINE)
    return max(1, min((int(size or tasks) for size, tasks in limits), default=_ARRAY_SIZE))


def _ask(argv: Sequence[str], seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands without the user's SQUEUE_ defaults; a failure where it is missing or is silent."""
    program = find(argv[0])
    if program is None:
        return subprocess.CompletedProcess(argv, EXIT_FAILED, "", "it is not on this machine")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    seconds = _ANSWER_SECONDS if seconds is None else seconds
    try:
        done = subprocess.run(
            [program, *argv[1:]],
            env=environ,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:  # they retry for a minute when the controller is down
        return subprocess.CompletedProcess(argv, EXIT_FAILED, "", f"no answer within {seconds:g} s")
    return subprocess.CompletedProcess(argv, done.returncode, done.stdout, done.stderr)
