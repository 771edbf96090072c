"""A range test of the learning rate: rates that grow step by step, and what the losses say. Pure, and free of torch.

Source: Smith, "Cyclical Learning Rates for Training Neural Networks", 2017, section 3.3. The suggestion is the rate of
the steepest descent of the smoothed loss over the logarithm of the rate, as in fastai's and Lightning's finders; a loss
of four times the best one ends the test, as there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ddpexp.errors import DdpexpError

_DIVERGED = 4.0  # times the best smoothed loss
_BETA = 0.9  # of the running mean that tells divergence
_WINDOW = 20  # the curve is smoothed over a twentieth of its points to each side
_FEWEST = 10  # points of a curve that says anything
_CERTAIN = 3.0  # times the noise of a smoothed point, by which the loss must fall


@dataclass(frozen=True)
class Rising:
    """A schedule that grows by the same factor in every step."""

    low: float  # factor of optimizer.lr at the first step
    high: float  # at the last

    def factor(self, step: int, num_steps: int) -> float:
        """Return the factor at `step`."""
        return self.low * math.pow(self.high / self.low, step / max(1, num_steps - 1))


class Divergence:
    """Tells from the losses so far whether the training has diverged."""

    def __init__(self) -> None:
        """Begin without losses."""
        self._sum, self._weight, self._best = 0.0, 0.0, math.inf

    def add(self, loss: float) -> bool:
        """Add the loss of a step; return whether the training has diverged."""
        self._sum = _BETA * self._sum + (1 - _BETA) * loss
        self._weight = _BETA * self._weight + 1 - _BETA
        mean = self._sum / self._weight
        self._best = min(self._best, mean)
        return not math.isfinite(mean) or (self._best > 0 and mean > _DIVERGED * self._best)


@dataclass(frozen=True)
class Curve:
    """The losses of a range test: those of the steps up to the divergence, if there is one."""

    rates: Sequence[float]
    losses: Sequence[float]
    has_diverged: bool

    @property
    def smoothed(self) -> list[float]:
        """Return the mean of the middle half of the losses around each point: a single bad batch is no slope."""
        width = max(1, len(self.losses) // _WINDOW)
        return [_middle(self.losses[max(0, place - width) : place + width + 1]) for place in range(len(self.losses))]

    @property
    def lowest(self) -> int:
        """Return the place of the lowest smoothed loss."""
        smoothed = self.smoothed
        return smoothed.index(min(smoothed))

    def suggestion(self) -> float:
        """Return the rate of the steepest descent before the lowest loss.

        Raises:
            DdpexpError: the losses do not show it.
        """
        smoothed, lowest = self.smoothed, self.lowest if self.losses else 0
        if len(self.losses) < _FEWEST or lowest < 2:
            raise DdpexpError(
                f"The loss does not fall at any rate: it grows from {self._first} on",
                suggestion="Begin with a smaller rate (--low), or look for what is wrong with the loss: ddpexp check.",
            )
        begin = max(2, len(self.losses) // 10)
        level = _mean(self.losses[:begin])
        noise = math.sqrt(_mean([(loss - level) ** 2 for loss in self.losses[:begin]]) / begin)
        if level - smoothed[lowest] <= max(_CERTAIN * noise, 1e-3 * abs(level)):
            raise DdpexpError(
                f"The loss stays about {level:.4g} from a rate of {self.rates[0]:.3g} to {self.rates[-1]:.3g}",
                suggestion="Try higher rates (--high) or more steps (--steps), or see whether the model learns at all: "
                "ddpexp check.",
            )
        inner = range(1, lowest + 1)
        steepest = min(inner, key=lambda place: smoothed[min(place + 1, len(smoothed) - 1)] - smoothed[place - 1])
        return self.rates[steepest]

    @property
    def _first(self) -> str:
        return f"a rate of {self.rates[0]:.3g}" if self.rates else "the first step"

    def points(self) -> list[tuple[float, float]]:
        """Return rates and smoothed losses, for a picture."""
        return list(zip(self.rates, self.smoothed, strict=True))


def curve_of(losses: Sequence[float], low: float, high: float, num_steps: int, failed: bool) -> Curve:
    """Return the curve of a test with so many steps; `failed`: it has ended by a loss that is not finite."""
    divergence, kept = Divergence(), []
    for loss in losses:
        if divergence.add(loss):
            failed = True
            break
        kept.append(loss)
    rising = Rising(low, high)
    return Curve([rising.factor(step, num_steps) for step in range(len(kept))], kept, failed)


def rounded(rate: float) -> float:
    """Return a rate with two digits."""
    return float(f"{rate:.1e}")


def _middle(values: Sequence[float]) -> float:
    cut = len(values) // 4
    return _mean(sorted(values)[cut : len(values) - cut])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
