"""What `ddpexp table` and `ddpexp status` print, as plain values for `--json` and for Python.

The keys are stable; docs/python.md explains them. Numbers that are not finite are None, since JSON has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ddpexp.sweep.comparison import Group, Sample, best_of, over_seeds, sorted_rows
from ddpexp.sweep.record import Goal, is_finite
from ddpexp.sweep.rows import Row


def row_as_dict(row: Row) -> dict[str, Any]:
    """Return a job or a run."""
    return {
        "directory": str(row.path.absolute()),
        "name": row.name,
        "number": row.number,
        "status": row.status,
        "overrides": dict(row.overrides),
        "values": {key: row.plain(key) for key in row.values},
        "step": row.step,
        "metrics": {name: finite(value) for name, value in row.metrics.items()},
        "best": None if row.best is None else {**asdict(row.best), "value": finite(row.best.value)},
        "objective": finite(row.objective),
        "seconds": row.seconds,
        "started": row.started,
        "ended": row.ended,
        "job": str(row.job) if row.job is not None else None,
        "message": row.message,
        "tags": list(row.tags),
        "note": row.note,
    }


def listed_as_dict(row: Row) -> dict[str, Any]:
    """Return a job or a run of a list, which compares nothing."""
    compared = ("values", "objective", "number")
    return {key: value for key, value in row_as_dict(row).items() if key not in compared}


def table_as_dict(rows: Sequence[Row], goal: Goal) -> dict[str, Any]:
    """Return the table: the rows, the best first, and the means over seeds."""
    best = best_of(rows, goal)
    return {
        "objective": goal.metric,
        "mode": goal.mode,
        "by_best": goal.by_best,
        "best": str(best.path.absolute()) if best is not None else None,
        "rows": [row_as_dict(row) for row in sorted_rows(rows, goal)],
        "seeds": [_group_as_dict(group, goal) for group in over_seeds(rows, goal)],
    }


def _group_as_dict(group: Group, goal: Goal) -> dict[str, Any]:
    sample = group.sample(goal)
    return {
        "overrides": dict(group.values),
        "values": dict(group.settings),
        "jobs": group.jobs,
        "done": len(sample.values),
        "mean": finite(sample.mean),
        "std": finite(sample.std),
        "interval": [finite(end) for end in sample.interval or ()] or None,
        "metrics": {name: _sample_as_dict(sample) for name, sample in group.metrics.items()},
    }


def group_records(rows: Sequence[Row], goal: Goal) -> list[dict[str, Any]]:
    """Return a record for each metric of each group of runs that differ only in their seed or fold, the best first."""
    return [
        {**group.settings, "metric": name, **_sample_as_dict(sample)}
        for group in over_seeds(rows, goal)
        for name, sample in group.metrics.items()
    ]


def _sample_as_dict(sample: Sample) -> dict[str, Any]:
    low, high = sample.interval or (None, None)
    numbers = {"mean": sample.mean, "std": sample.std, "low": low, "high": high}
    return {"n": len(sample.values), **{name: finite(value) for name, value in numbers.items()}}


def finite(value: float | None) -> float | None:
    """Return a number, or None where it is not finite."""
    return value if is_finite(value) else None
