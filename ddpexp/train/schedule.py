"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no scheduler state.

A schedule of your own is any class with a method `factor`, named by `scheduler._target_`. Of those here, all but
`OneCycle`, whose rise is its warm-up, derive from `Warmup`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from ddpexp.errors import RefusedError


@dataclass(frozen=True)
class Warmup:
    """A linear warm-up, then what `after_warmup` of a derived class returns; here a constant."""

    warmup: float = 0.0  # fraction of all steps
    warmup_steps: int | None = field(default=None, kw_only=True)  # in place of `warmup`

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            RefusedError: one is out of range.
        """
        check_fraction("scheduler.warmup", self.warmup, "scheduler.warmup_steps")
        check_steps("scheduler.warmup_steps", self.warmup_steps)

    def first_step(self, num_steps: int) -> int:
        """Return the first step after the warm-up."""
        return round(self.warmup * num_steps) if self.warmup_steps is None else self.warmup_steps

    def factor(self, step: int, num_steps: int) -> float:
        """Return the factor at `step`: it rises to 1 during the warm-up."""
        first = self.first_step(num_steps)
        return (step + 1) / first if step < first else self.after_warmup(step, first, num_steps)

    def after_warmup(self, step: int, first: int, num_steps: int) -> float:
        """Return the factor at a step from `first` on."""
        return 1.0


@dataclass(frozen=True)
class Constant(Warmup):
    """A constant learning rate."""


@dataclass(frozen=True)
class Linear(Warmup):
    """A straight line down."""

    floor: float = 0.0  # factor at the last step

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        check_fraction("scheduler.floor", self.floor)

    def after_warmup(self, step: int, first: int, num_steps: int) -> float:
        """Return the factor at a step from `first` on."""
        return self.floor + (1 - self.floor) * (1 - _progress(step, first, num_steps))


@dataclass(frozen=True)
class Polynomial(Linear):
    """A power of what is left of the steps."""

    power: float = 2.0

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if not 0 < self.power < math.inf:
            raise RefusedError(f"scheduler.power={self.power}: use a number above 0; 1 is scheduler=linear.")

    def after_warmup(self, step: int, first: int, num_steps: int) -> float:
        """Return the factor at a step from `first` on."""
        left: float = (1 - _progress(step, first, num_steps)) ** self.power
        return self.floor + (1 - self.floor) * left


@dataclass(frozen=True)
class Exponential(Warmup):
    """The same share less in every step."""

    floor: float = 0.01  # factor at the last step

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        check_fraction("scheduler.floor", self.floor)
        if self.floor == 0:
            raise RefusedError("scheduler.floor=0 is never reached by the same share less in every step: use 0.001.")

    def after_warmup(self, step: int, first: int, num_steps: int) -> float:
        """Return the factor at a step from `first` on."""
        return math.pow(self.floor, _progress(step, first, num_steps))


@dataclass(frozen=True)
class Cosine(Warmup):
    """Half a cosine down, as often as `cycles` says; each cycle after the first begins with a restart at 1.

    Source: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017.
    """

    warmup: float = 0.05
    floor: float = 0.0  # factor at the last step of each cycle
    cycles: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        check_fraction("scheduler.floor", self.floor)
        if self.cycles < 1:
            raise RefusedError(f"scheduler.cycles={self.cycles}: use the number of times that the rate falls, from 1.")

    def after_warmup(self, step: int, first: int, num_steps: int) -> float:
        """Return the factor at a step from `first` on."""
        length = max(1, num_steps - first)
        cycle = min((step - first) * self.cycles // length, self.cycles - 1)
        begin, end = (first - (-number * length // self.cycles) for number in (cycle, cycle + 1))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * _progress(step, begin, end))) / 2


@dataclass(frozen=True)
class MultiStep(Warmup):
    """A constant rate that is multiplied by `gamma` at each milestone."""

    milestones: tuple[float, ...] = (0.5, 0.75)  # fractions of all steps below 1, or steps
    gamma: float = 0.1
    floor: float = 0.0  # the factor gets no smaller

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        check_fraction("scheduler.gamma", self.gamma)
        check_fraction("scheduler.floor", self.floor)
        shown = f"scheduler.milestones=[{','.join(f'{value:.15g}' for value in self.milestones)}]"
        shares = [value for value in self.milestones if 0 < value < 1]
        steps = [value for value in self.milestones if value >= 1 and float(value).is_integer()]
        if len(self.milestones) not in (len(shares), len(steps)):
            raise RefusedError(f"{shown}: use fractions of all steps, such as [0.5,0.75], or steps, such as [300,600].")
        if any(one >= other for one, other in pairwise(self.milestones)):
            raise RefusedError(f"{shown}: each must come after the one before.")

    def after_warmup(self, step: int, first: int, num_steps: int) -> float:
        """Return the factor at a step from `first` on."""
        passed = sum(step >= (value if value >= 1 else round(value * num_steps)) for value in self.milestones)
        return max(self.floor, self.gamma**passed)


@dataclass(frozen=True)
class WSD(Warmup):
    """Warm-up, a stable phase, and a decay at the end: a checkpoint of the stable phase can begin a longer run.

    Source: Hu et al., "MiniCPM: Unveiling the Potential of Small Language Models", 2024; Haegele et al., "Scaling Laws
    and Compute-Optimal Training Beyond Fixed Training Durations", 2024.
    """

    warmup: float = 0.05
    decay: float = 0.2  # fraction of all steps
    decay_steps: int | None = None  # in place of `decay`
    shape: Literal["linear", "cosine", "sqrt"] = "linear"
    floor: float = 0.0  # factor at the last step

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        check_fraction("scheduler.decay", self.decay, "scheduler.decay_steps")
        check_steps("scheduler.decay_steps", self.decay_steps)
        check_fraction("scheduler.floor", self.floor)

    def after_warmup(self, step: int, first: int, num_steps: int) -> float:
        """Return the factor at a step from `first` on."""
        length = round(self.decay * num_steps) if self.decay_steps is None else self.decay_steps
        begin = max(first, num_steps - length)
        if step < begin:
            return 1.0
        progress = _progress(step, begin, num_steps)
        if self.shape == "cosine":
            left = (1 + math.cos(math.pi * progress)) / 2
        else:
            left = 1 - (math.sqrt(progress) if self.shape == "sqrt" else progress)
        return self.floor + (1 - self.floor) * left


@dataclass(frozen=True)
class OneCycle:
    """Half a cosine up from `start`, then half a cosine down to `end`; momentum is not changed.

    Source: Smith and Topin, "Super-Convergence", 2018.
    """

    peak_at: float = 0.3  # fraction of all steps
    start: float = 0.04
    end: float = 0.0
    warmup_steps: int | None = None  # until the peak, in place of `peak_at`

    def __post_init__(self) -> None:
        """Check the values."""
        check_fraction("scheduler.peak_at", self.peak_at, "scheduler.warmup_steps")
        check_fraction("scheduler.start", self.start)
        check_fraction("scheduler.end", self.end)
        check_steps("scheduler.warmup_steps", self.warmup_steps)

    def factor(self, step: int, num_steps: int) -> float:
        """Return the factor at `step`: 1 at the peak."""
        peak = max(1.0, self.peak_at * (num_steps - 1) if self.warmup_steps is None else self.warmup_steps)
        if step <= peak:
            return _cosine(self.start, 1.0, step / peak)
        return _cosine(1.0, self.end, (step - peak) / max(1.0, num_steps - 1 - peak))


def check_fraction(key: str, value: float, steps_key: str | None = None) -> None:
    """Check a fraction; `steps_key` is the key that takes a number of steps in its place.

    Raises:
        RefusedError: it is none.
    """
    if not 0 <= value <= 1:
        is_steps = steps_key is not None and value > 1 and float(value).is_integer()
        meant = f" For steps, type {steps_key}={int(value)}." if is_steps else ""
        raise RefusedError(f"{key}={value} is not a fraction: use a number from 0 to 1.{meant}")


def check_steps(key: str, value: int | None) -> None:
    """Check a number of steps that may be null.

    Raises:
        RefusedError: it is negative.
    """
    if value is not None and value < 0:
        raise RefusedError(f"{key}={value}: use a number of steps from 0, or null.")


def _progress(step: int, first: int, num_steps: int) -> float:
    """Return how far `step` is from `first` to the last step, as a fraction."""
    return min(1.0, (step - first) / max(1, num_steps - 1 - first))


def _cosine(begin: float, end: float, fraction: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * min(1.0, fraction))) / 2
