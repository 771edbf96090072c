"""The learning rates of a run over its steps, for a picture."""

from __future__ import annotations

from collections.abc import Mapping

from torch.optim import Optimizer

from ddpexp.config.schema import Experiment
from ddpexp.train.build import build_schedule
from ddpexp.train.learning_rates import LearningRates

_MOST_POINTS = 1000


def curves_of(
    experiment: Experiment, optimizers: Mapping[str, Optimizer], steps_per_epoch: int, num_steps: int
) -> dict[str, list[tuple[int, float]]]:
    """Return steps with their rates, by the name of each record, `lr` or `lr/GROUP`.

    A schedule that follows a metric is shown as if that always improved.
    """
    rates = LearningRates(optimizers, build_schedule(experiment, num_steps), num_steps, steps_per_epoch)
    curves: dict[str, list[tuple[int, float]]] = {}
    for step in shown_steps(num_steps):
        rates.set(step)
        for suffix, rate in rates.recorded().items():
            curves.setdefault(f"lr{suffix}", []).append((step + 1, rate))
    return curves


def shown_steps(num_steps: int) -> list[int]:
    """Return the steps of a picture: all, or a thousand at equal distances, and always the last."""
    count = min(num_steps, _MOST_POINTS)
    return sorted({round(number * (num_steps - 1) / max(1, count - 1)) for number in range(count)})
