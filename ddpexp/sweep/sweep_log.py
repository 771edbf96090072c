"""What a start of a sweep has planned and how its jobs ended: in memory, in sweep.jsonl and on the display."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddpexp.config.build import did_you_mean
from ddpexp.settings.run import SweepSettings
from ddpexp.sweep.early import names_of
from ddpexp.sweep.folder import EventLog, SweepDir
from ddpexp.sweep.job import Planned
from ddpexp.sweep.job_result import Ended
from ddpexp.sweep.record import Goal
from ddpexp.sweep.table import shown
from ddpexp.sweep.view import View
from ddpexp.system import files
from ddpexp.system.terminal import print_message
from ddpexp.system.text import duration


class SweepLog:
    """The log of one start."""

    def __init__(self, folder: SweepDir, settings: SweepSettings, view: View) -> None:
        """Write nothing yet."""
        self.folder = folder
        self.goal = Goal(settings.objective, settings.mode)
        self.settings = settings
        self.view = view
        self._events: EventLog | None = None
        self._refused = False  # everything that was to be submitted
        self._warned = False  # that a job does not report the objective
        self.planned: dict[int, Planned] = {}
        self.ended: dict[int, Ended] = {}

    @property
    def began(self) -> bool:
        """Return whether anything was recorded that has begun since."""
        return self._events is not None and not self._refused

    def begin(self, overrides: Sequence[str], options: Sequence[str], title: str, **facts: Any) -> None:
        """Record the sweep, once; from here on the directory belongs to it."""
        if self._events is not None:
            return
        print_message(title)
        command = {"words": list(overrides), "options": list(options)}
        try:
            self.folder.logs.mkdir(exist_ok=True)
            files.write_yaml(self.folder.command, command)
            self._events = EventLog(self.folder)
        except OSError as error:
            raise self.folder.not_writable(error) from None
        objective = {"objective": self.settings.objective, "mode": self.settings.mode}
        self._events.add("sweep", words=list(overrides), **facts, **objective)

    def refuse(self) -> None:
        """Take note that a scheduler has refused jobs: without another one the sweep has not begun."""
        self._refused = not self.ended

    def add_jobs(self, jobs: Sequence[Planned]) -> None:
        """Record the jobs of a batch."""
        for job in jobs:
            if job.number not in self.planned:
                self.planned[job.number] = job
                self.add("planned", job=job.number, name=job.name, overrides=list(job.overrides))

    def add(self, event: str, **facts: Any) -> None:
        """Record an event."""
        assert self._events is not None
        self._events.add(event, **facts)

    def end(self, job: Planned, ended: Ended, code: int, seconds: float | None) -> None:
        """Record and show how a job ended."""
        self.ended[job.number] = ended
        self.add(
            "ended", job=job.number, status=ended.status, exit_code=code, objective=ended.objective,
            message=ended.message,
            **({"seconds": round(seconds, 3)} if seconds is not None else {}),
        )  # fmt: skip
        self.view.ended(self._line(job, ended, seconds))
        if ended.status == "done" and ended.objective is None:
            self._warn_of_objective(job)

    def check_objective(self, job: Planned) -> bool:
        """Warn if a running job has recorded without the objective; return whether that can be said by now.

        A metric of an evaluation may be said to be missing once there was one, a metric of training after the first
        record of training.
        """
        metric = self.settings.objective
        if metric is None:
            return True
        names, of_training = names_of(job.run), metric.startswith("train/")
        if metric not in names and any(
            name.endswith("/loss") and name.startswith("train/") == of_training for name in names
        ):
            self._warn_of_objective(job, " so far")
            return True
        return metric in names

    def ended_as(self, *statuses: str) -> list[int]:
        """Return the numbers of the jobs that have ended with one of these statuses, in order."""
        return [number for number, ended in sorted(self.ended.items()) if ended.status in statuses]

    def lost_objective(self) -> str | None:
        """Return a message if no job that is done reports the objective; None if one does, or if none is set."""
        done = self.ended_as("done")
        if self.settings.objective is None or not done or any(self.ended[job].objective is not None for job in done):
            return None
        directory = files.typed(self.folder.path)
        return (
            f"{self._no_objective(self.planned[done[0]])} The jobs are done: python -m ddpexp table {directory} "
            "sweep.objective=... shows them."
        )

    def close(self) -> None:
        """Close the file."""
        if self._events is not None:
            self._events.close()

    def _warn_of_objective(self, job: Planned, until: str = "") -> None:
        """Warn that a job does not report the objective, once a sweep."""
        if self.settings.objective is not None and not self._warned:
            self._warned = True
            print_message(f"ddpexp: warning: {self._no_objective(job, until)}")

    def _no_objective(self, job: Planned, until: str = "") -> str:
        metric = self.settings.objective
        assert metric is not None
        suggestion = did_you_mean(metric, names_of(job.run), "sweep.objective=")
        return f"sweep.objective={metric} is no metric that job {job.name} reports{until}. {suggestion}"

    def _line(self, job: Planned, ended: Ended, seconds: float | None) -> str:
        name = self.goal.of_run(job.experiment.trainer.keep_best).name
        value = f"  {name} {shown(name, ended.objective)}" if name is not None and ended.objective is not None else ""
        took = f"  {duration(seconds)}" if seconds is not None else ""
        reason = f": {ended.message}" if ended.message else ""
        return f"{len(self.ended)}/{len(self.planned)}  {job.name}  {ended.status}{reason}{value}{took}"
