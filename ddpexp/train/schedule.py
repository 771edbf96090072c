"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no scheduler state.

A schedule of your own is any class with a method `factor`, named by `scheduler._target_`. Of those here, all but
`OneCycle`, whose rise is its warm-up, derive from `Warmup`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Literal

from ddpexp.errors import RefusedError
from ddpexp.settings.key import Key

_WHOLE = r"[1-9]\d*(\.0)?"
_FOR_STEPS = {_WHOLE: "For steps, use scheduler.warmup_steps."}


@dataclass(frozen=True)
class Warmup:
    """A linear warm-up, then what `after_warmup` of a derived class returns; here a constant."""

    warmup: Annotated[float, Key(at_least=0, at_most=1, advice=_FOR_STEPS)] = 0.0  # fraction of all steps
    warmup_steps: Annotated[int | None, Key(at_least=0)] = field(default=None, kw_only=True)  # in place of `warmup`

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

    floor: Annotated[float, Key(at_least=0, at_most=1)] = 0.0  # factor at the last step

    def after_warmup(self, step: int, first: int, num_steps: int) -> float:
        """Return the factor at a step from `first` on."""
        return self.floor + (1 - self.floor) * (1 - _progress(step, first, num_steps))


@dataclass(frozen=True)
class Polynomial(Linear):
    """A power of what is left of the steps."""

    power: Annotated[float, Key(above=0, below=math.inf)] = 2.0  # 1 is a straight line

    def after_warmup(self, step: int, first: int, num_steps: int) -> float:
        """Return the factor at a step from `first` on."""
        left: float = (1 - _progress(step, first, num_steps)) ** self.power
        return self.floor + (1 - self.floor) * left


@dataclass(frozen=True)
class Exponential(Warmup):
    """The same share less in every step."""

    floor: Annotated[float, Key(above=0, at_most=1)] = 0.01  # factor at the last step

    def after_warmup(self, step: int, first: int, num_steps: int) -> float:
        """Return the factor at a step from `first` on."""
        return math.pow(self.floor, _progress(step, first, num_steps))


@dataclass(frozen=True)
class Cosine(Warmup):
    """Half a cosine down, as often as `cycles` says; each cycle after the first begins with a restart at 1.

    Source: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017.
    """

    warmup: Annotated[float, Key(at_least=0, at_most=1, advice=_FOR_STEPS)] = 0.05
    floor: Annotated[float, Key(at_least=0, at_most=1)] = 0.0  # factor at the last step of each cycle
    cycles: Annotated[int, Key(at_least=1)] = field(default=1, kw_only=True)  # times that the rate falls

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
    gamma: Annotated[float, Key(at_least=0, at_most=1)] = 0.1
    floor: Annotated[float, Key(at_least=0, at_most=1)] = 0.0  # the factor gets no smaller

    def __post_init__(self) -> None:
        """Check the milestones.

        Raises:
            RefusedError: they are neither fractions nor steps, or not in order.
        """
        key, shown = "scheduler.milestones", f"[{','.join(f'{value:.15g}' for value in self.milestones)}]"
        shares = [value for value in self.milestones if 0 < value < 1]
        steps = [value for value in self.milestones if value >= 1 and float(value).is_integer()]
        if len(self.milestones) not in (len(shares), len(steps)):
            raise RefusedError(
                key=key,
                value=shown,
                suggestion="Use fractions of all steps, such as [0.5,0.75], or steps, such as [300,600].",
            )
        if any(one >= other for one, other in pairwise(self.milestones)):
            raise RefusedError("is not in ascending order", key=key, value=shown)

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

    warmup: Annotated[float, Key(at_least=0, at_most=1, advice=_FOR_STEPS)] = 0.05
    decay: Annotated[float, Key(at_least=0, at_most=1, advice={_WHOLE: "For steps, use scheduler.decay_steps."})] = (
        0.2  # fraction of all steps
    )
    decay_steps: Annotated[int | None, Key(at_least=0)] = None  # in place of `decay`
    shape: Literal["linear", "cosine", "sqrt"] = "linear"
    floor: Annotated[float, Key(at_least=0, at_most=1)] = 0.0  # factor at the last step

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

    peak_at: Annotated[float, Key(at_least=0, at_most=1, advice=_FOR_STEPS)] = 0.3  # fraction of all steps
    start: Annotated[float, Key(at_least=0, at_most=1)] = 0.04
    end: Annotated[float, Key(at_least=0, at_most=1)] = 0.0
    warmup_steps: Annotated[int | None, Key(at_least=0)] = None  # until the peak, in place of `peak_at`

    def factor(self, step: int, num_steps: int) -> float:
        """Return the factor at `step`: 1 at the peak."""
        peak = max(1.0, self.peak_at * (num_steps - 1) if self.warmup_steps is None else self.warmup_steps)
        if step <= peak:
            return _cosine(self.start, 1.0, step / peak)
        return _cosine(1.0, self.end, (step - peak) / max(1.0, num_steps - 1 - peak))


def _progress(step: int, first: int, num_steps: int) -> float:
    """Return how far `step` is from `first` to the last step, as a fraction."""
    return min(1.0, (step - first) / max(1, num_steps - 1 - first))


def _cosine(begin: float, end: float, fraction: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * min(1.0, fraction))) / 2
