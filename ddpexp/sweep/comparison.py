"""Compare the jobs of a sweep: what differs between them, which is best, and means over seeds."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from ddpexp.errors import RefusedError
from ddpexp.sweep.record import Goal
from ddpexp.sweep.rows import Row, goal_of, rows_of

SEED, FOLD = "trainer.seed", "data.fold"
LAST = "last "
"""What the name of a metric's column begins with, where another has the best value."""

# Student's t for an interval of 95 %, by the degrees of freedom from 1.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip

_ANYWHERE = ("recipe",)  # groups of options that set keys of other sections


@dataclass(frozen=True)
class Sample:
    """The values of a metric over seeds or folds."""

    values: Sequence[float]

    @property
    def mean(self) -> float | None:
        """Return the mean; nan when a value is, None without a value."""
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
        half = t95(freedom) * std / math.sqrt(freedom + 1)
        return mean - half, mean + half


def t95(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution, right to three digits after the point."""
    # Beyond the table by Cornish and Fisher's expansion.
    return _T95[freedom - 1] if freedom <= len(_T95) else 1.959964 + 2.37227 / freedom + 2.8225 / freedom**2


@dataclass(frozen=True)
class Group:
    """Jobs that differ only in their seed or fold."""

    values: Mapping[str, str]  # that they share, by key
    settings: Mapping[str, Any]  # the same as plain values
    jobs: int
    metrics: Mapping[str, Sample]  # of those that are done, by the name of the column

    def sample(self, goal: Goal) -> Sample:
        """Return the values of what jobs are compared by."""
        return self.metrics.get(goal.name or "", Sample(()))


def by_best(rows: Sequence[Row], goal: Goal) -> tuple[list[Row], Goal]:
    """Have each row count by its best value, where the trainer.keep_best of every run keeps that of the objective."""
    begun = [row for row in rows if row.resolved]
    if not begun or not all(goal.keeps(row.resolved.get("trainer.keep_best")) for row in begun):
        return list(rows), replace(goal, by_best=False)
    best = [row if row.best is None else replace(row, objective=row.best.value) for row in rows]
    return best, replace(goal, by_best=True)


def varying(rows: Sequence[Row], every: bool = False) -> list[str]:
    """Return the keys whose resolved values differ between rows, or have changed during a run; first those typed.

    Keys that nobody has typed, and that follow from an option whose choice differs, are left out unless `every`.
    """
    typed = {key for row in rows for key in row.overrides}
    keys = dict.fromkeys(key for row in rows for key in row.values)
    differ = [
        key
        for key in keys
        if any(key in row.changed for row in rows) or len({row.values[key] for row in rows if key in row.values}) > 1
    ]
    chosen = [] if every else [key for key in differ if key in typed and not any(key in row.resolved for row in rows)]
    sections = {path.partition(".")[0] for row in rows for path in row.resolved}
    is_open = any(key in _ANYWHERE or key.partition(".")[0] not in sections for key in chosen)
    return [
        key for key in differ if key in typed or not (is_open or any(key.startswith(f"{choice}.") for choice in chosen))
    ]


def num_distinguished_pairs(rows: Sequence[Row | Group], key: str) -> int:
    """Return how many pairs of rows a key distinguishes."""
    return (len(rows) ** 2 - sum(count**2 for count in Counter(row.values.get(key) for row in rows).values())) // 2


def best_of(rows: Sequence[Row], goal: Goal) -> Row | None:
    """Return the best of the rows that are done or, if none is, of the running ones."""
    for statuses in (("done",), ("running", "interrupted", "killed", "stopped")):
        best = goal.best([row for row in rows if row.status in statuses], attrgetter("objective"))
        if best is not None:
            return best
    return None


def best_job(path: Path) -> Row:
    """Return the job of a sweep's directory with the best value of its objective.

    Raises:
        RefusedError: the sweep has no objective, or no job has a value of it.
    """
    rows, goal = by_best(rows_of(path), goal_of(path))
    if goal.metric is None:
        raise RefusedError(
            "has no objective, by which a job would be the best",
            place=path,
            suggestion="Start the sweep with sweep.objective=eval/loss, or name one of its jobs.",
        )
    best = best_of(rows, goal)
    if best is None:
        raise RefusedError(f"has no job that has recorded {goal.metric} yet", place=path)
    return best


def repeats(rows: Sequence[Row]) -> list[str]:
    """Return the keys whose values repeat an experiment, the seed and the fold, as far as they vary."""
    return [key for key in varying(rows) if key in (SEED, FOLD)]


def over_seeds(rows: Sequence[Row], goal: Goal) -> list[Group]:
    """Return what the seeds, or the folds, have in common, for each combination of the other values, the best first.

    Nothing where neither varies.
    """
    repeated = repeats(rows)
    if not repeated:
        return []
    keys = [key for key in varying(rows) if key not in repeated]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.values.get(key, "") for key in keys), []).append(row)
    found = [_group(keys, group, goal) for group in groups.values()]
    return goal.best_first(found, lambda group: group.sample(goal).mean)


def _group(keys: Sequence[str], rows: Sequence[Row], goal: Goal) -> Group:
    done = [columns_of(row, goal) for row in rows if row.status == "done"]
    samples = {
        name: Sample([columns[name] for columns in done if name in columns])
        for name in dict.fromkeys(name for columns in done for name in columns)
    }
    values = {key: rows[0].values.get(key, "") for key in keys}
    return Group(values, {key: rows[0].plain(key) for key in keys}, len(rows), samples)


def columns_of(row: Row, goal: Goal) -> dict[str, float]:
    """Return the metrics of a row, and the value of its best step, by the names of their columns."""
    best = {} if row.best is None else {f"best {row.best.metric}": row.best.value}
    objective = {} if goal.name is None or row.objective is None else {goal.name: row.objective}
    return {**objective, **row.metrics, **best}  # the objective is the first, and may be known from the log alone


def chosen_column(name: str, rows: Sequence[Row], goal: Goal) -> str:
    """Return the column that a metric is shown in: the best value where every run keeps it, and the last one else."""
    having = [row for row in rows if name in row.metrics]
    is_best = bool(having) and all(row.best is not None and row.best.metric == name for row in having)
    if name == goal.metric:
        is_best = goal.by_best
    return f"best {name}" if is_best else name


def sorted_rows(rows: Sequence[Row], goal: Goal) -> list[Row]:
    """Return the rows, the best first; those that have nothing to compare come last, as they are."""
    return goal.best_first(rows, attrgetter("objective"))


def metrics_of(rows: Sequence[Row]) -> list[str]:
    """Return the metrics that rows can be compared by: those of evaluations, or else of training."""
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    return [name for name in names if not name.startswith("train/")] or list(names)
