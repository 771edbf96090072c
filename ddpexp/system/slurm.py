"""Call Slurm's own commands: submit scripts, query the states of jobs and the limit on array sizes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.system.programs import environ_of_others, find, located
from ddpexp.system.terminal import say

RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED")
ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "TIMEOUT",
         "FORGOTTEN")  # fmt: skip
_ANSWER_SECONDS = 15.0
_ARRAY_SIZE = 1001  # Slurm's default. Source: slurm.conf(5), MaxArraySize
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


def is_id(text: object) -> bool:
    """Return whether the text is the id of a job, 123, or of an array task, 123_4."""
    return isinstance(text, str) and re.fullmatch(r"\d+(_\d+)?", text, re.ASCII) is not None


def own_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the id of this process's job in the form that users know: 123, or 123_4 for an array task."""
    names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
    if all(name in environ for name in names):
        return "_".join(environ[name] for name in names)
    return environ.get("SLURM_JOB_ID")


def exact_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return an id of this process's job that is unambiguous for Slurm.

    Every array task has a job id of its own, except one, whose id is the whole array's: for it the form 123_4 is
    returned. A job submitted from inside an array task inherits that task's array variables, so they alone do not
    identify it.
    """
    number = environ.get("SLURM_JOB_ID")
    return own_id(environ) if number == environ.get("SLURM_ARRAY_JOB_ID") else number


def sbatch(script: Path) -> str:
    """Submit a script and return the job's id.

    Raises:
        RefusedError: Slurm rejects it; the message has Slurm's reason. OSError: there is no sbatch.
    """
    # This variable would override the script's own array directive.
    environ = {name: value for name, value in os.environ.items() if name != "SBATCH_ARRAY_INX"}
    argv = [located("sbatch"), "--parsable", str(script)]
    # A new session: otherwise Ctrl-C could end sbatch after the submission but before it has printed the job's id.
    done = subprocess.run(
        argv, env=environ_of_others(environ), capture_output=True, text=True, errors="replace", start_new_session=True
    )
    if done.returncode:
        raise RefusedError(
            f"sbatch did not take the job: {' '.join(done.stderr.split()) or done.returncode} ({script})"
        )
    if done.stderr.strip():  # messages of the cluster
        say(done.stderr.rstrip())
    return done.stdout.strip().split(";")[0]


@contextmanager
def signals_wait() -> Iterator[None]:
    """Defer stop signals until a submitted job is recorded: nothing else knows its id."""
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in _STOPS}
    before = {number: handler for number, handler in before.items() if callable(handler)}
    for number in before:
        signal.signal(number, lambda number, _frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])


def state(job_id: str) -> tuple[str, int]:
    """Query a job's state and exit code; scontrol works without an accounting database.

    Each line is matched by its first key: text that users choose, such as the job's name, never starts a line.
    """
    done = _ask(["scontrol", "show", "job", job_id])
    if done is None:
        return "UNKNOWN", EXIT_DONE
    job_state = re.search(r"^ +JobState=(\w+)", done.stdout, re.MULTILINE)
    code = re.search(r"^ +Requeue=.* ExitCode=(\d+):(\d+)", done.stdout, re.MULTILINE)
    if done.returncode or job_state is None:
        # The second message, on standard output, is for a task whose array Slurm still knows.
        gone = "Invalid job id" in done.stderr or re.match(r"Job \d+_\d+ not found", done.stdout)
        return ("FORGOTTEN" if gone else "UNKNOWN"), EXIT_DONE
    if code is None:
        return job_state[1], EXIT_DONE
    return job_state[1], 128 + int(code[2]) if int(code[2]) else int(code[1])


def states(job_ids: Iterable[str]) -> dict[str, str]:
    """Query the states of many jobs and array tasks in one call: PENDING, RUNNING, COMPLETED, FAILED and so on.

    FORGOTTEN: ended long ago (MinJobAge of the cluster, five minutes by default). UNKNOWN: Slurm is not installed or
    does not answer, or the text is not a job id.
    """
    requested = list(job_ids)
    unknown = dict.fromkeys(requested, "UNKNOWN")
    jobs = {text.partition("_")[0] for text in requested if is_id(text)}
    if not jobs:
        return unknown
    argv = ["squeue", "--noheader", "--array", "--states=all", "--format=%i %A %T", f"--jobs={','.join(sorted(jobs))}"]
    done = _ask(argv)
    if done is None or (done.returncode and "Invalid job id" not in done.stderr):
        return unknown
    rows = [line.split() for line in done.stdout.splitlines()]
    # An array task has a job id of its own too, as %A.
    by_id = {row[1]: row[2] for row in rows} | {row[0]: row[2] for row in rows}
    return {text: by_id.get(text, "FORGOTTEN") if is_id(text) else "UNKNOWN" for text in requested}


def is_over(job_id: str) -> bool | None:
    """Return whether a job has ended; None: Slurm is not installed, or does not answer."""
    job_state = state(job_id)[0]
    return None if job_state == "UNKNOWN" else job_state in ENDED


def array_size() -> int:
    """Return how many tasks an array may have on this cluster."""
    done = _ask(["scontrol", "show", "config"])
    limits = re.findall(r"^MaxArraySize\s*=\s*(\d+)|\bmax_array_tasks=(\d+)", done.stdout if done else "", re.MULTILINE)
    return max(1, min((int(size or tasks) for size, tasks in limits), default=_ARRAY_SIZE))


def _ask(argv: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """Run one of Slurm's commands without the user's SQUEUE_ defaults; None if it is missing or does not answer."""
    program = find(argv[0])
    if program is None:
        return None
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        return subprocess.run(
            [program, *argv[1:]],
            env=environ,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_SECONDS,
        )
    except subprocess.TimeoutExpired:  # they retry for a minute when the controller is down
        return None
