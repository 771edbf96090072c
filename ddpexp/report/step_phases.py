"""Where the time of a run's steps has gone: means over its steps, or over spans of them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from ddpexp.report.records import MeasuredSteps
from ddpexp.settings.metrics import TIMES
from ddpexp.train.step_times import NOBODY, RECORDED_PHASES, SLOW_FACTOR, SLOW_RANK

_SPANS = 12
_OFTEN = 0.5  # of the steps, from which on a slow rank is named


def bars(measured: Sequence[MeasuredSteps], spans: bool) -> list[dict[str, Any]]:
    """Return a bar of phases for all steps or, with `spans`, for a dozen of equal spans of them.

    Each has a `label`, the `phases` of `RECORDED_PHASES` in seconds a step, and in `slow` the rank that the others wait
    for, if any.
    """
    if not measured:
        return []
    last = measured[-1].last
    groups: dict[int, list[MeasuredSteps]] = {}
    for record in measured:
        groups.setdefault((record.last - 1) * _SPANS // max(1, last) if spans else 0, []).append(record)
    found, after = [], 0
    for of_span in groups.values():
        found.append({
            "label": f"steps {after + 1:,} to {of_span[-1].last:,}",
            "phases": [_mean(of_span, phase) for phase in RECORDED_PHASES],
            "slow": _slow(of_span),
        })  # fmt: skip
        after = of_span[-1].last
    return found


def _mean(records: Sequence[MeasuredSteps], phase: str) -> float:
    total = sum(record.measures.get(f"{TIMES}{phase}", 0.0) * record.weight for record in records)
    return total / sum(record.weight for record in records)


def _slow(records: Sequence[MeasuredSteps]) -> str:
    """Return which rank the others wait for, in how many of the steps, and how much slower it is."""
    steps: dict[float, float] = {}
    for record in records:
        rank = record.measures.get(SLOW_RANK, NOBODY)
        steps[rank] = steps.get(rank, 0.0) + record.weight
    rank = max(steps, key=lambda rank: steps[rank])
    part = steps[rank] / sum(steps.values())
    if rank < 0 or part < _OFTEN:
        return ""
    factor = median(
        record.measures.get(SLOW_FACTOR, 1.0) for record in records if record.measures.get(SLOW_RANK) == rank
    )
    return f"rank {rank:.0f} in {part:.0%} of the steps, {factor:.2g} times slower"
