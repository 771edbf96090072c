"""The job schedulers that ddpexp supports, and their jobs: this process's own, and those that records name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ddpexp.system.job_schedulers.base import JobScheduler, JobState
from ddpexp.system.job_schedulers.slurm import SLURM

SCHEDULERS: tuple[JobScheduler, ...] = (SLURM,)
_DEFAULT = SLURM  # records that name no scheduler are Slurm's


@dataclass(frozen=True)
class ScheduledJob:
    """A job of a scheduler."""

    scheduler: JobScheduler
    id: str  # not validated if it was read from a record

    def is_current(self) -> bool:
        """Return whether this process belongs to the job."""
        return self.id in (self.scheduler.job_id(), self.scheduler.unique_job_id())

    def is_over(self) -> bool | None:
        """Return whether the job has ended; None if that is unknown."""
        return self.scheduler.is_over(self.id) if self.scheduler.is_job_id(self.id) else None

    def cancel_command(self) -> str:
        """Return the command with which the user cancels the job."""
        return self.scheduler.cancel_command([self.id])

    def as_record(self) -> dict[str, str]:
        """Return what the record of a submission contains, for `recorded_job`."""
        return {"job_id": self.id, **({} if self.scheduler is _DEFAULT else {"job_scheduler": self.scheduler.name})}

    def __str__(self) -> str:
        """Return its name in messages."""
        return f"{self.scheduler.label} job {self.id}"


def current_job() -> ScheduledJob | None:
    """Return the job of a scheduler to which this process belongs; None outside a job."""
    for scheduler in SCHEDULERS:
        if (job_id := scheduler.unique_job_id()) is not None:
            return ScheduledJob(scheduler, job_id)
    return None


def restart_count() -> int | None:
    """Return how many times a scheduler has restarted this process's job; None if none has."""
    return next((count for scheduler in SCHEDULERS if (count := scheduler.restart_count()) is not None), None)


def scheduler_named(name: object) -> JobScheduler | None:
    """Return the scheduler of this name; None if this version of ddpexp knows none."""
    return next((scheduler for scheduler in SCHEDULERS if scheduler.name == name), None)


def recorded_job(record: Mapping[str, Any]) -> ScheduledJob | None:
    """Return the job that the record of a submission (`as_record`) names; None if it names none."""
    job_id, scheduler = record.get("job_id"), scheduler_named(record.get("job_scheduler", _DEFAULT.name))
    return ScheduledJob(scheduler, job_id) if isinstance(job_id, str) and scheduler is not None else None


def owner_keys(job: ScheduledJob | None) -> dict[str, str | None]:
    """Return the job of a process that owns a lock as the lock records it, for `owning_job`: a key per scheduler."""
    return {
        f"{scheduler.name}_job": job.id if job is not None and job.scheduler is scheduler else None
        for scheduler in SCHEDULERS
    }


def owning_job(record: Mapping[str, Any]) -> ScheduledJob | None:
    """Return the job that a lock names; None if it names none.

    Raises:
        ValueError: its id is invalid.
    """
    for scheduler in SCHEDULERS:
        job_id = record.get(f"{scheduler.name}_job")
        if job_id is not None and not scheduler.is_job_id(job_id):
            raise ValueError(f"{job_id!r} is not the id of a {scheduler.label} job")
        if job_id is not None:
            return ScheduledJob(scheduler, job_id)
    return None


def states(jobs: Iterable[ScheduledJob]) -> dict[ScheduledJob, JobState]:
    """Query the states of many jobs, with one call for each scheduler."""
    requested = list(jobs)
    result: dict[ScheduledJob, JobState] = {}
    for scheduler in SCHEDULERS:
        if of_scheduler := [job for job in requested if job.scheduler is scheduler]:
            by_id = scheduler.states([job.id for job in of_scheduler])
            result |= {job: by_id[job.id] for job in of_scheduler}
    return result
