"""Rows of a sweep or a run as plain values, for `--json` and for Python."""

from __future__ import annotations

import math
from typing import Any

from ddpexp.sweep.rows import Row


def row_as_dict(row: Row) -> dict[str, Any]:
    """Return a row with stable keys, which docs/python.md explains. Numbers that are not finite are None."""
    return {
        "number": row.number,
        "name": row.name,
        "directory": str(row.path.absolute()),
        "status": row.status,
        "overrides": dict(row.overrides),
        "step": row.step,
        "objective": finite(row.objective),
        "metrics": {name: finite(value) for name, value in row.metrics.items()},
        "seconds": row.seconds,
        "started": row.started,
        "ended": row.ended,
        "job": str(row.job) if row.job is not None else None,
        "message": row.message,
    }


def finite(value: float | None) -> float | None:
    """Return a number, or None where it is not finite: JSON has no such numbers."""
    return value if value is not None and math.isfinite(value) else None
