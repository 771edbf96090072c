"""Submit the jobs of a sweep to a job scheduler, and wait for those that are queued or running there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddpexp.config.plugins import launcher_name
from ddpexp.errors import EXIT_DONE, EXIT_FAILED, RefusedError
from ddpexp.launch import Job
from ddpexp.launch.launchers.base import Launcher, Submitter
from ddpexp.settings.run import SweepSettings
from ddpexp.sweep.job import Planned
from ddpexp.sweep.job_result import Ended, ResultReader
from ddpexp.sweep.record import JobRecord
from ddpexp.sweep.sweep_log import SweepLog
from ddpexp.system.job_schedulers import ScheduledJob, states


def submitter_of(jobs: Sequence[Planned], settings: SweepSettings, is_grid: bool) -> Submitter | None:
    """Return the launcher that submits those jobs that do not run here, if there are any.

    Raises:
        RefusedError: the sweep needs what only a command that watches its jobs can do.
    """
    launcher = next((job.experiment.launcher for job in jobs if job.submits), None)
    if launcher is None:
        return None
    assert isinstance(launcher, Submitter)
    name = launcher_name(type(launcher))
    for key, default in (("early_stop", None), ("retries", 0), ("on_failure", "continue")):
        value = getattr(settings, key)
        if value != default:
            raise RefusedError(
                f"needs a command that watches the jobs, but launcher={name} submits them to a scheduler",
                key=f"sweep.{key}",
                value=value,
                suggestion="Leave it out, or run the sweep inside an allocation.",
            )
    if not is_grid and not launcher.wait and not launcher.dry_run:
        raise RefusedError(
            "only submits jobs, but hydra/sweeper chooses jobs by their results",
            key="launcher",
            value=name,
            suggestion="Add launcher.wait=true.",
        )
    return launcher


class Submissions:
    """The jobs of a sweep that were submitted."""

    def __init__(self, log: SweepLog, results: ResultReader, options: Sequence[str]) -> None:
        """Take the options of the sweep's command line that say where configs are, and no jobs yet."""
        self._log = log
        self._results = results
        self._options = options
        self._submitted: dict[int, ScheduledJob] = {}

    def find_queued(self, jobs: Iterable[JobRecord]) -> dict[int, Ended]:
        """Return those jobs of earlier starts that are still queued or running at their scheduler, by number."""
        submitted = {job.number: job.scheduled for job in jobs if job.scheduled is not None}
        if not submitted:
            return {}
        state_of = states(submitted.values())
        queued = {number: job for number, job in submitted.items() if state_of[job].is_over is False}
        self._submitted |= queued
        return {number: Ended("submitted") for number in queued}

    def show(self, submitter: Submitter, jobs: Sequence[Planned]) -> None:
        """Print what would be submitted."""
        submitter.submit(self._trainings(jobs), self._log.folder.path, lambda index, job_id: None)

    def submit(self, submitter: Submitter, jobs: Sequence[Planned]) -> None:
        """Submit the jobs and record their ids."""

        def submitted(index: int, job_id: str) -> None:
            job = jobs[index]
            scheduled = ScheduledJob(job.experiment.launcher.job_scheduler, job_id)
            self._log.add("submitted", job=job.number, **scheduled.as_record())
            self._submitted[job.number] = scheduled
            self._log.ended[job.number] = Ended("submitted")

        submitter.submit(self._trainings(jobs), self._log.folder.path, submitted)

    def follow(self, submitter: Submitter, jobs: Sequence[Planned]) -> None:
        """Wait until the submitted jobs have ended."""
        pending = [
            job for job in jobs if job.number in self._submitted and self._log.ended[job.number].status == "submitted"
        ]

        def ended(index: int, state: str, code: int) -> None:
            job = pending[index]
            code = EXIT_DONE if job.run.status() == "done" else code or EXIT_FAILED
            result = self._results.result(job, code)
            if job.run.status() == "submitted":
                result = Ended(
                    "failed", None, f"{self._submitted[job.number]} ended as {state} before its command began"
                )
            self._log.end(job, result, code, None)

        submitter.follow([self._submitted[job.number].id for job in pending], ended)

    def _trainings(self, jobs: Sequence[Planned]) -> list[tuple[Launcher, Job]]:
        return [(job.experiment.launcher, job.training(self._options).job) for job in jobs]
