"""What Slurm's own commands are asked: to take a script, how far jobs are, how much an array holds."""

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
_ARRAY_SIZE = 1001  # of a Slurm that says nothing else. Source: slurm.conf(5), MaxArraySize
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


def is_id(text: object) -> bool:
    """Tell whether this names a job, 123, or a task of an array, 123_4."""
    return isinstance(text, str) and re.fullmatch(r"\d+(_\d+)?", text, re.ASCII) is not None


def own_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the job that this process belongs to, as people call it: 123, or 123_4 for a task of an array."""
    names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
    if all(name in environ for name in names):
        return "_".join(environ[name] for name in names)
    return environ.get("SLURM_JOB_ID")


def exact_id(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the job that this process belongs to, so that Slurm takes it for no other.

    A task of an array has a number of its own, but for one, which has that of the array and thus of all. And a job that
    was submitted from inside a task has inherited the task's name.
    """
    number = environ.get("SLURM_JOB_ID")
    return own_id(environ) if number == environ.get("SLURM_ARRAY_JOB_ID") else number


def sbatch(script: Path) -> str:
    """Submit a script and return the job's number.

    Raises:
        RefusedError: Slurm does not take it, in its words. OSError: there is no sbatch.
    """
    # This variable would count for more than what the script says.
    environ = {name: value for name, value in os.environ.items() if name != "SBATCH_ARRAY_INX"}
    words = [located("sbatch"), "--parsable", str(script)]
    # A session of its own: Ctrl-C would end it when the job is submitted and its number is not told yet.
    done = subprocess.run(
        words, env=environ_of_others(environ), capture_output=True, text=True, errors="replace", start_new_session=True
    )
    if done.returncode:
        raise RefusedError(
            f"sbatch did not take the job: {' '.join(done.stderr.split()) or done.returncode} ({script})"
        )
    if done.stderr.strip():  # what the cluster has to say
        say(done.stderr.rstrip())
    return done.stdout.strip().split(";")[0]


@contextmanager
def signals_wait() -> Iterator[None]:
    """Have a stop signal wait until a job that is submitted is written down too: nobody else knows its number."""
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in _STOPS}
    before = {number: handler for number, handler in before.items() if callable(handler)}
    for number in before:
        signal.signal(number, lambda got, _frame: came.append(got))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def state(job_id: str) -> tuple[str, int]:
    """Ask Slurm for a job's state and exit code; scontrol knows them without an accounting database.

    Each line is asked for by its first word: what users choose, such as the job's name, begins none.
    """
    done = _ask(["scontrol", "show", "job", job_id])
    if done is None:
        return "UNKNOWN", EXIT_DONE
    found = re.search(r"^ +JobState=(\w+)", done.stdout, re.MULTILINE)
    code = re.search(r"^ +Requeue=.* ExitCode=(\d+):(\d+)", done.stdout, re.MULTILINE)
    if done.returncode or found is None:
        # The second, on standard output, is said of a task whose array it still knows.
        gone = "Invalid job id" in done.stderr or re.match(r"Job \d+_\d+ not found", done.stdout)
        return ("FORGOTTEN" if gone else "UNKNOWN"), EXIT_DONE
    if code is None:
        return found[1], EXIT_DONE
    return found[1], 128 + int(code[2]) if int(code[2]) else int(code[1])


def states(job_ids: Iterable[str]) -> dict[str, str]:
    """Ask Slurm once for the states of many jobs and tasks of arrays: PENDING, RUNNING, COMPLETED, FAILED and so on.

    FORGOTTEN: ended, long ago (MinJobAge of the cluster, five minutes by default). UNKNOWN: Slurm is not here, does not
    answer, or the text names no job.
    """
    asked = list(job_ids)
    found = dict.fromkeys(asked, "UNKNOWN")
    jobs = {text.partition("_")[0] for text in asked if is_id(text)}
    if not jobs:
        return found
    words = ["squeue", "--noheader", "--array", "--states=all", "--format=%i %A %T", f"--jobs={','.join(sorted(jobs))}"]
    done = _ask(words)
    if done is None or (done.returncode and "Invalid job id" not in done.stderr):
        return found
    rows = [line.split() for line in done.stdout.splitlines()]
    shown = {row[1]: row[2] for row in rows} | {
        row[0]: row[2] for row in rows
    }  # a task of an array has a number of its own too
    return {text: shown.get(text, "FORGOTTEN") if is_id(text) else "UNKNOWN" for text in asked}


def is_over(job_id: str) -> bool | None:
    """Tell whether a job has ended; None: Slurm is not here, or does not answer."""
    found = state(job_id)[0]
    return None if found == "UNKNOWN" else found in ENDED


def array_size() -> int:
    """Return how many tasks an array of this cluster may have."""
    done = _ask(["scontrol", "show", "config"])
    limits = re.findall(r"^MaxArraySize\s*=\s*(\d+)|\bmax_array_tasks=(\d+)", done.stdout if done else "", re.MULTILINE)
    return max(1, min((int(one or other) for one, other in limits), default=_ARRAY_SIZE))


def _ask(words: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """Run one of Slurm's commands, without what the user's shell has it leave out; None where there is none."""
    program = find(words[0])
    if program is None:
        return None
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        return subprocess.run(
            [program, *words[1:]],
            env=environ,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_SECONDS,
        )
    except subprocess.TimeoutExpired:  # they look for a controller that is down for a minute
        return None
