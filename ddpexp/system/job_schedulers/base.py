"""The interface of a job scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

FORGOTTEN = "FORGOTTEN"  # the job ended long ago: the scheduler no longer knows how
UNKNOWN = "UNKNOWN"  # the scheduler is not installed here, or does not answer


@dataclass(frozen=True)
class JobState:
    """The state of a job."""

    name: str  # the scheduler's own, such as RUNNING, or one of the two above
    is_over: bool | None  # None: unknown
    reason: str = ""  # why the state is unknown, in the scheduler's own words


class JobScheduler(Protocol):
    """A job scheduler (workload manager); not to be confused with the schedule of the learning rate.

    To add one, write a class with these members in a module of this package, and list an instance in `SCHEDULERS`.
    """

    @property
    def name(self) -> str:
        """Return its name in records on disk, which never changes."""
        ...

    @property
    def label(self) -> str:
        """Return its name in messages."""
        ...

    def job_id(self) -> str | None:
        """Return the id of this process's job in the form that users know; None outside a job of this scheduler."""
        ...

    def unique_job_id(self) -> str | None:
        """Return the id of this process's job in the form that is unambiguous for the scheduler, for records."""
        ...

    def restart_count(self) -> int | None:
        """Return how many times the scheduler has restarted this process's job; None if never."""
        ...

    def is_job_id(self, text: object) -> bool:
        """Return whether a value, which may come from a file that is not trusted, has the form of a job's id."""
        ...

    def is_over(self, job_id: str) -> bool | None:
        """Return whether a job has ended; None: the scheduler is not installed here, or does not answer."""
        ...

    def states(self, job_ids: Iterable[str]) -> dict[str, JobState]:
        """Query the states of many jobs at once; the ids may come from files that are not trusted."""
        ...

    def submit(self, script: Path) -> str:
        """Submit a job that a file describes, and return its id.

        Raises:
            RefusedError: the scheduler rejects it. OSError: its command is missing.
        """
        ...

    def cancel_command(self, job_ids: Sequence[str]) -> str:
        """Return the command with which the user cancels jobs."""
        ...
