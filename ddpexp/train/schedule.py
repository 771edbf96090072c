"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no scheduler state.

A schedule of your own is any class with a method `factor`, named by `scheduler._target_`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddpexp.errors import RefusedError


@dataclass(frozen=True)
class Constant:
    """A constant learning rate."""

    def factor(self, step: int, num_steps: int) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class Cosine:
    """Linear warmup over the first fraction of the steps, then half a cosine down.

    Source: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, without restarts.
    """

    warmup: float = 0.05  # fraction of all steps
    floor: float = 0.0  # factor at the last step

    def __post_init__(self) -> None:
        _check_fraction("scheduler.warmup", self.warmup)
        _check_fraction("scheduler.floor", self.floor)

    def factor(self, step: int, num_steps: int) -> float:
        """Return the factor at `step`: in (0, 1] during warmup, then down to `floor`."""
        warmup_steps = round(self.warmup * num_steps)
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


@dataclass(frozen=True)
class OneCycle:
    """Half a cosine up from `start`, then half a cosine down to `end`; momentum is not changed.

    Source: Smith and Topin, "Super-Convergence", 2018.
    """

    peak_at: float = 0.3  # fraction of all steps
    start: float = 0.04
    end: float = 0.0

    def __post_init__(self) -> None:
        _check_fraction("scheduler.peak_at", self.peak_at)
        _check_fraction("scheduler.start", self.start)
        _check_fraction("scheduler.end", self.end)

    def factor(self, step: int, num_steps: int) -> float:
        """Return the factor at `step`: 1 at the peak."""
        peak = max(1.0, self.peak_at * (num_steps - 1))
        if step <= peak:
            return _cosine(self.start, 1.0, step / peak)
        return _cosine(1.0, self.end, (step - peak) / max(1.0, num_steps - 1 - peak))


def _cosine(begin: float, end: float, fraction: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * min(1.0, fraction))) / 2


def _check_fraction(key: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise RefusedError(f"{key}={value} is not a fraction: use a number from 0 to 1.")
