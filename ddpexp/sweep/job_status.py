"""The status of a job, from its files, the record of its sweep, and the processes and schedulers that run it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from ddpexp.run import directory, lock
from ddpexp.sweep.files import RunFiles, text_of
from ddpexp.sweep.record import JobRecord
from ddpexp.system.job_schedulers import ScheduledJob, recorded_job, states
from ddpexp.system.job_schedulers.base import JobState

Status = Literal["waiting", "submitted", "running", "done", "stopped", "interrupted", "killed", "failed", "broken"]
STATUSES: dict[Status, str] = {
    "waiting": "it has not started yet",
    "submitted": "it waits in the scheduler's queue, or is about to begin",
    "running": "its command is running",
    "done": "it has reached its last step, or ended early as configured",
    "stopped": "early stopping ended it",
    "interrupted": "a signal ended it, and its state is saved",
    "killed": "its command ended without a result, as after SIGKILL",
    "failed": "it ended with an error",
    "broken": "its files cannot be read",
}
"""What a status means."""
FINAL: tuple[Status, ...] = ("done", "stopped")  # is not run again
UNFINISHED: tuple[Status, ...] = ("interrupted", "killed", "failed")  # can be resumed
NOT_ENDED: tuple[Status, ...] = ("waiting", "submitted", "running")
_QUERY_INTERVAL_FACTOR = 20.0  # times as long as the scheduler took to answer, until it is queried again


def explained() -> list[str]:
    """Return a line for each status, for the help of `ddpexp status`."""
    return [f"  {name:<13}{meaning}" for name, meaning in STATUSES.items()]


def status_of(path: Path, job: JobRecord, run: RunFiles, queue: Queue) -> tuple[Status, str | None]:
    """Return a job's status and a message, from the sweep's log and from the files of its run."""
    recorded = run.result.get("status")
    if recorded == "done":
        return "done", text_of(run.result.get("stopped"))
    is_alive, owner = _owner_is_alive(path, queue)
    if is_alive is not False:
        return "running", None if is_alive else f"whether {owner} is still running cannot be checked from this host"
    if job.newest == "started" and _owner_is_alive(path.parent, queue)[0] is not False:
        return "running", None  # its command has not got to the directory yet, or has just left it
    if run.problem is not None:
        return "broken", run.problem
    if recorded == "interrupted":
        return ("stopped", job.message) if job.status == "stopped" else ("interrupted", None)
    if recorded == "failed":
        return "failed", run.failure or job.message
    if recorded == "submitted" or (recorded is None and job.newest == "submitted"):
        return _queued(job.scheduled or recorded_job(run.result), queue)
    if recorded is not None:
        return "broken", f"result.json says status {recorded!s}, which no run writes"
    if job.newest == "ended":
        if job.status in STATUSES:
            return job.status, job.message
        return "broken", f"sweep.jsonl says status {job.status!s}, which no sweep writes"
    return ("killed" if job.newest == "started" or run.is_there else "waiting"), None


def _queued(job: ScheduledJob | None, queue: Queue) -> tuple[Status, str | None]:
    if job is not None and queue.has(job) is False:
        return "killed", f"{job} is no longer in the queue, and has recorded no result"
    return "submitted", None


class Queue:
    """The states of jobs in the queues of their schedulers.

    All are queried together, when one is needed, and not again for much longer than the answer took.
    """

    def __init__(self) -> None:
        """Query nothing yet."""
        self._jobs: set[ScheduledJob] = set()
        self._states: dict[ScheduledJob, JobState] = {}
        self._next_query = 0.0

    def add(self, jobs: Iterable[ScheduledJob]) -> None:
        """Add jobs to those that are queried together."""
        self._jobs |= set(jobs)

    def has(self, job: ScheduledJob) -> bool | None:
        """Return whether a job is waiting or running; None: its scheduler is not here, or does not answer."""
        begin = time.monotonic()
        if begin >= self._next_query or job not in self._states:
            self._jobs.add(job)
            self._states = states(self._jobs)
            end = time.monotonic()
            self._next_query = end + 1.0 + _QUERY_INTERVAL_FACTOR * (end - begin)
        is_over = self._states[job].is_over
        return None if is_over is None else not is_over


def _owner_is_alive(path: Path, queue: Queue) -> tuple[bool | None, str]:
    """Return whether the command that owns a directory is running (None: cannot be checked here), and its name."""
    owner = lock.read(path / lock.NAME)
    if owner is None:
        return False, ""
    if owner.host != directory.host() and owner.job is not None:
        return queue.has(owner.job), str(owner)
    return owner.is_alive(), str(owner)
