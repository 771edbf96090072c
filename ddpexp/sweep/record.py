"""What a sweep's log of events says: its goal, and each of its jobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeGuard, TypeVar

from ddpexp.errors import RefusedError
from ddpexp.sweep.files import number_of, text_of
from ddpexp.system.job_schedulers import ScheduledJob, recorded_job

T = TypeVar("T")

_JOBS = 10**9  # more than any sweep has, and a number that a file's name takes
_OF_JOBS = ("planned", "submitted", "started", "ended")


@dataclass(frozen=True)
class Goal:
    """What jobs are compared by."""

    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    by_best: bool = False  # each run counts by the best value of the metric, which its trainer.keep_best keeps

    @property
    def extreme(self) -> str:
        """Return the word for the best value."""
        return "lowest" if self.mode == "min" else "highest"

    @property
    def name(self) -> str | None:
        """Return the name of the value that a job is compared by, as a column has it."""
        return f"best {self.metric}" if self.by_best else self.metric

    def keeps(self, keep_best: str | None) -> bool:
        """Return whether a run with this trainer.keep_best keeps what it is compared by."""
        return self.metric is not None and keep_best == f"{self.mode}:{self.metric}"

    def of_run(self, keep_best: str | None) -> Goal:
        """Return the goal as it is for runs with this trainer.keep_best.

        Raises:
            RefusedError: it keeps the best in the other direction.
        """
        mode, _, metric = (keep_best or "").partition(":")
        if self.metric is not None and metric == self.metric and mode != self.mode:
            raise RefusedError(
                f"keeps the {replace(self, mode='max' if self.mode == 'min' else 'min').extreme} value, but "
                f"sweep.mode={self.mode} compares by the {self.extreme}",
                key="trainer.keep_best",
                value=keep_best,
                suggestion=f"Use the same direction for both: trainer.keep_best={self.mode}:{self.metric}, or "
                f"sweep.mode={mode}.",
            )
        return replace(self, by_best=self.keeps(keep_best))

    def best_first(self, items: Iterable[T], value_of: Callable[[T], float | None]) -> list[T]:
        """Return the items, the best first; those without a finite value come last, in their order."""
        sign = 1 if self.mode == "min" else -1

        def sort_key(item: T) -> tuple[bool, float]:
            value = value_of(item)
            return (False, sign * value) if self.metric is not None and is_finite(value) else (True, 0.0)

        return sorted(items, key=sort_key)

    def best(self, items: Iterable[T], value_of: Callable[[T], float | None]) -> T | None:
        """Return the best item; None if none has a finite value."""
        first = next(iter(self.best_first(items, value_of)), None)
        return first if first is not None and self.metric is not None and is_finite(value_of(first)) else None


@dataclass(frozen=True)
class JobRecord:
    """A job in the log. Anybody may have written it: its values have the right types, and may be wrong."""

    number: int
    name: str | None = None  # of its directory; None: no job was planned, or the name leads elsewhere
    overrides: tuple[str, ...] | None = None
    scheduled: ScheduledJob | None = None  # where it was submitted
    newest: Literal["planned", "submitted", "started", "ended"] = "planned"  # event
    started: float | None = None  # seconds since 1970, of the newest start, as `ended`
    ended: float | None = None
    seconds: float | None = None  # from start to end
    status: str | None = None  # at its end, as the next two
    objective: float | None = None
    message: str | None = None

    def after(self, event: Mapping[str, Any]) -> JobRecord:
        """Return the job after a further event."""
        if event["event"] == "planned":
            return replace(self, name=_file_name(event.get("name")), overrides=_texts(event.get("overrides")))
        before = JobRecord(self.number, self.name, self.overrides, self.scheduled)
        moment = number_of(event.get("time", False))
        if event["event"] == "submitted":
            return replace(before, newest="submitted", scheduled=recorded_job(event))
        if event["event"] == "started":
            return replace(before, newest="started", started=moment)
        objective = event.get("objective")
        return replace(
            before,
            newest="ended",
            started=self.started,
            ended=moment,
            seconds=number_of(event.get("seconds", False)),
            status=text_of(event.get("status")),
            objective=None if objective is None else number_of(objective),
            message=text_of(event.get("message")),
        )


@dataclass(frozen=True)
class SweepRecord:
    """A sweep in its log, over all its starts."""

    goal: Goal = Goal()  # of the newest start
    jobs: Mapping[int, JobRecord] = field(default_factory=dict)  # by number

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> SweepRecord:
        """Read the events, the oldest first."""
        goal = Goal()
        jobs: dict[int, JobRecord] = {}
        for event in events:
            number = event.get("job")
            if event["event"] == "sweep":
                goal = Goal(text_of(event.get("objective")), "max" if event.get("mode") == "max" else "min")
            elif event["event"] in _OF_JOBS and isinstance(number, int) and 0 <= number < _JOBS:
                jobs[number] = jobs.get(number, JobRecord(number)).after(event)
        return cls(goal, jobs)


def is_finite(value: float | None) -> TypeGuard[float]:
    """Return whether a value can be compared."""
    return value is not None and math.isfinite(value)


def _file_name(value: Any) -> str | None:
    """Return the name of a file in the same folder."""
    is_plain = isinstance(value, str) and 0 < len(value) < 256 and not {"/", "\0"} & set(value)
    return value if is_plain and value not in (".", "..") else None


def _texts(value: Any) -> tuple[str, ...] | None:
    is_valid = isinstance(value, list) and all(isinstance(text, str) for text in value)
    return tuple(value) if is_valid else None
