"""Compare the jobs of a sweep: what differs between them, which is best, and means over seeds."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from ddpexp.sweep.record import Goal
from ddpexp.sweep.rows import Row

SEED, FOLD = "trainer.seed", "data.fold"

# Student's t for an interval of 95 %, by the degrees of freedom from 1.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Jobs that differ only in their seed or fold."""

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

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the ends of the 95 % confidence interval of the mean, by Student's t; None for a single value."""
        mean = self.mean
        std = self.std
        freedom = len(self.values) - 1
        if mean is None or std is None:
            return None
        # Beyond the table by Cornish and Fisher's expansion, right to three digits there.
        t = _T95[freedom - 1] if freedom <= len(_T95) else 1.959964 + 2.37227 / freedom + 2.8225 / freedom**2
        half = t * std / math.sqrt(freedom + 1)
        return mean - half, mean + half


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
        best = goal.best([row for row in rows if row.status in statuses], attrgetter("objective"))
        if best is not None:
            return best
    return None


def repeats(rows: Sequence[Row]) -> list[str]:
    """Return the keys whose values repeat an experiment, the seed and the fold, as far as they vary."""
    return [key for key in varying(rows) if key in (SEED, FOLD)]


def over_seeds(rows: Sequence[Row]) -> list[Group]:
    """Return what the seeds, or the folds, have in common, for each combination of the other values.

    Nothing where neither varies.
    """
    repeated = repeats(rows)
    if not repeated:
        return []
    keys = [key for key in varying(rows) if key not in repeated]
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
    return goal.best_first(rows, attrgetter("objective"))


def metrics_of(rows: Sequence[Row]) -> list[str]:
    """Return the metrics that rows can be compared by: those of evaluations, or else of training."""
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    return [name for name in names if not name.startswith("train/")] or list(names)
