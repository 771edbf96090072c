"""What `ddpexp table` and `ddpexp status` print, as plain values for `--json` and for Python.

The keys are stable; docs/python.md explains them. Numbers that are not finite are None, since JSON has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from ddpexp.sweep.comparison import best_of, over_seeds, sorted_rows
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
        "step": row.step,
        "metrics": {name: finite(value) for name, value in row.metrics.items()},
        "objective": finite(row.objective),
        "seconds": row.seconds,
        "started": row.started,
        "ended": row.ended,
        "job": str(row.job) if row.job is not None else None,
        "message": row.message,
    }


def table_as_dict(rows: Sequence[Row], goal: Goal) -> dict[str, Any]:
    """Return the table: the rows, the best first, and the means over seeds."""
    best = best_of(rows, goal)
    groups = over_seeds(rows) if goal.metric is not None else []
    return {
        "objective": goal.metric,
        "mode": goal.mode,
        "best": str(best.path.absolute()) if best is not None else None,
        "rows": [row_as_dict(row) for row in sorted_rows(rows, goal)],
        "seeds": [
            {
                "overrides": dict(group.overrides),
                "jobs": group.jobs,
                "done": len(group.values),
                "mean": finite(group.mean),
                "std": finite(group.std),
                "interval": [finite(end) for end in group.interval or ()] or None,
            }
            for group in goal.best_first(groups, attrgetter("mean"))
        ],
    }


def finite(value: float | None) -> float | None:
    """Return a number, or None where it is not finite."""
    return value if is_finite(value) else None
