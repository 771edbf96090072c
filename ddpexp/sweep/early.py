"""Early stopping: rules that compare a job's objective so far with that of the others at the same step."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from ddpexp.run.directory import RunDir
from ddpexp.system.json_lines import json_lines

_OTHERS = 4  # how many must have come as far before the median is used

Curve = Sequence[tuple[int, float]]
"""The objective of one job after each evaluation: step and value, in the order of steps."""


def prune_reason(
    rule: Literal["median", "halving"],
    mode: Literal["min", "max"],
    after: int,
    factor: int,
    job: int,
    curves: Mapping[int, Curve],
) -> str | None:
    """Return why a job should be stopped, None if it may continue; `curves` are those of all jobs, by number.

    median: its best value is worse than the median of the others' best values up to the same step. halving: at the
    steps after, after * factor, after * factor^2, ... only the best of each `factor` jobs that have come there so far
    continues.

    Source: median, Golovin et al., Google Vizier, KDD 2017, 3.2.2; halving, Li et al., ASHA, MLSys 2020, without its
    queue: every job starts, and is compared with those that reached the step before it.
    """
    curve = curves.get(job) or ()
    reached = [step for step, _ in curve if step >= after]
    if not reached:
        return None
    sign = 1.0 if mode == "min" else -1.0
    if rule == "median":
        step = reached[-1]
        others = [
            _best(other, step, sign)
            for number, other in curves.items()
            if number != job and other and other[-1][0] >= step
        ]
        mine = _best(curve, step, sign)
        if len(others) >= _OTHERS and mine > (median := statistics.median(others)):
            return (
                f"{sign * mine:.4g} at step {step} is worse than the median {sign * median:.4g} of {len(others)} others"
            )
        return None
    rung = after
    while rung <= reached[-1]:
        values = {number: value for number, other in curves.items() if (value := _at(other, rung, sign)) is not None}
        num_better = sum(value < values[job] for value in values.values())
        if len(values) >= factor and num_better >= len(values) // factor:
            return (
                f"{sign * values[job]:.4g} at step {rung} is number {num_better + 1} of {len(values)}: one in {factor} "
                "continues"
            )
        rung *= factor
    return None


def best_so_far(curve: Curve, mode: Literal["min", "max"]) -> Curve:
    """Return for each step of a curve the best value until then."""
    better = min if mode == "min" else max
    values = itertools.accumulate((value for _, value in curve), better)
    return [(step, value) for (step, _), value in zip(curve, values, strict=True)]


def names_of(run: RunDir) -> list[str]:
    """Return the metrics that a run reports."""
    return list(dict.fromkeys(name for record in json_lines(run.metrics) for name in record if "/" in name))


def _best(curve: Curve, until: int, sign: float) -> float:
    return min((_comparable(sign * value) for step, value in curve if step <= until), default=math.inf)


def _at(curve: Curve, rung: int, sign: float) -> float | None:
    """Return the value of the first evaluation at a step or after it."""
    return next((_comparable(sign * value) for step, value in curve if step >= rung), None)


def _comparable(value: float) -> float:
    return math.inf if math.isnan(value) else value
