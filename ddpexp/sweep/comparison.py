"""Compare the jobs of a sweep: what differs between them, which is best, and means over seeds."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpexp.sweep.rows import Goal, Row

if TYPE_CHECKING:
    pass


SEED = "trainer.seed"


@dataclass(frozen=True)
class Group:
    """Jobs that differ only in their seed."""

    overrides: Mapping[str, str]
    jobs: int
    values: Sequence[float]  # of those that are done

    @property
    def mean(self) -> float | None:
        """Return the mean; nan when a value is."""
        return sum(self.values) / len(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        """Return the sample standard deviation; None for a single value."""
        if len(self.values) < 2:
            return None
        return statistics.stdev(self.values) if all(map(math.isfinite, self.values)) else math.nan


def varying(rows: Sequence[Row]) -> list[str]:
    """Return the keys that were not typed with the same value for all rows, in the order of typing.

    Of a job that has not begun only its own overrides are known: a key that it lacks is not a difference.
    """
    keys = dict.fromkeys(key for row in rows for key in row.overrides)
    begun = [row for row in rows if row.status not in ("waiting", "submitted")]
    values: dict[str, set[str | None]] = {key: {row.overrides.get(key) for row in begun} for key in keys}
    for row in rows:
        for key, value in row.overrides.items():
            values[key].add(value)
    return [key for key in keys if len(values[key]) > 1]


def num_distinguished_pairs(rows: Sequence[Row | Group], key: str) -> int:
    """Return how many pairs of rows a key distinguishes."""
    return (len(rows) ** 2 - sum(count**2 for count in Counter(row.overrides.get(key) for row in rows).values())) // 2


def best_of(rows: Sequence[Row], goal: Goal) -> Row | None:
    """Return the best of the rows that are done or, if none is, of the running ones."""
    for statuses in (("done",), ("running", "interrupted", "killed", "stopped")):
        place = goal.best([row.objective if row.status in statuses else None for row in rows])
        if place is not None:
            return rows[place]
    return None


def over_seeds(rows: Sequence[Row]) -> list[Group]:
    """Return what the seeds have in common, for each combination of the other values.

    Nothing where the seed does not vary.
    """
    keys = varying(rows)
    if SEED not in keys:
        return []
    keys.remove(SEED)
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.overrides.get(key, "") for key in keys), []).append(row)
    return [
        Group(
            dict(zip(keys, values, strict=True)),
            len(group),
            [row.objective for row in group if row.status == "done" and row.objective is not None],
        )
        for values, group in groups.items()
    ]


def sorted_rows(rows: Sequence[Row], goal: Goal) -> list[Row]:
    """Return the rows, the best first; those that have nothing to compare come last, as they are."""
    return [rows[place] for place in best_first([row.objective for row in rows], goal)]


def metrics_of(rows: Sequence[Row]) -> list[str]:
    """Return the metrics that rows can be compared by: those of evaluations, or else of training."""
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    return [name for name in names if not name.startswith("train/")] or list(names)


def best_first(values: Sequence[float | None], goal: Goal) -> list[int]:
    """Return places, that of the best value first; those of nothing comparable last, in their order."""
    if goal.metric is None:
        return list(range(len(values)))
    sign = 1 if goal.mode == "min" else -1

    def key(place: int) -> tuple[bool, float]:
        value = values[place]
        return (False, sign * value) if value is not None and math.isfinite(value) else (True, 0.0)

    return sorted(range(len(values)), key=key)
