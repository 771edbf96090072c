"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no scheduler state.

One of your own is any class with `factor`, named by `scheduler._target_`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddpexp.errors import RefusedError


@dataclass(frozen=True)
class Constant:
    """Keep the learning rate."""

    def factor(self, step: int, num_steps: int) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class Cosine:
    """Rise linearly over the first share of the steps, then fall along half a cosine.

    Source: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, without restarts.
    """

    warmup: float = 0.05  # share of all steps
    floor: float = 0.0  # factor at the last step

    def __post_init__(self) -> None:
        _share("scheduler.warmup", self.warmup)
        _share("scheduler.floor", self.floor)

    def factor(self, step: int, num_steps: int) -> float:
        """Return the multiplier at `step`: in (0, 1] while rising, then down to `floor`."""
        rising = round(self.warmup * num_steps)
        if step < rising:
            return (step + 1) / rising
        progress = (step - rising) / max(1, num_steps - 1 - rising)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


@dataclass(frozen=True)
class OneCycle:
    """Rise along half a cosine from `start`, fall along another one to `end`; momentum stays.

    Source: Smith and Topin, "Super-Convergence", 2018.
    """

    peak_at: float = 0.3  # share of all steps
    start: float = 0.04
    end: float = 0.0

    def __post_init__(self) -> None:
        _share("scheduler.peak_at", self.peak_at)
        _share("scheduler.start", self.start)
        _share("scheduler.end", self.end)

    def factor(self, step: int, num_steps: int) -> float:
        """Return the multiplier at `step`: 1 at the peak."""
        peak = max(1.0, self.peak_at * (num_steps - 1))
        if step <= peak:
            return _cosine(self.start, 1.0, step / peak)
        return _cosine(1.0, self.end, (step - peak) / max(1.0, num_steps - 1 - peak))


def _cosine(begin: float, end: float, share: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * min(1.0, share))) / 2


def _share(key: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise RefusedError(f"{key}={value} is not a share: use a number from 0 to 1.")
