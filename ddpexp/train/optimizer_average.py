"""Weights that an optimizer averages itself, such as those of schedule-free ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from ddpexp.config.check_optimizer import no_average
from ddpexp.config.instantiate import locate
from ddpexp.config.registry import key_of
from ddpexp.config.schema import Experiment
from ddpexp.errors import RefusedError
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.sharded_optimizer import ShardedOptimizer
from ddpexp.train.average import WeightAverage, assign


@runtime_checkable
class HasModes(Protocol):
    """An optimizer that trains other weights than those that are to be evaluated; `train` and `eval` exchange them.

    Source: Defazio et al., "The Road Less Scheduled", 2024.
    """

    def train(self) -> None:
        """Give the parameters the values to train."""
        ...

    def eval(self) -> None:
        """Give the parameters the values to evaluate."""
        ...


class OptimizerAverage(WeightAverage):
    """The weights that optimizers with modes evaluate, kept as the average of the weights.

    Exchanging values rounds them, so the trained ones are put back to the bit: evaluations and checkpoints change
    nothing.
    """

    def __init__(self, models: Mapping[str, nn.Module], optimizers: Iterable[Optimizer], batch_norm: bool) -> None:
        """Begin to train."""
        super().__init__(models, batch_norm=batch_norm)
        self._optimizers = list(optimizers)
        self._is_current = False
        self._switch(training=True)

    @property
    def has_begun(self) -> bool:
        """Return True: it is another set of weights from the first step on."""
        return True

    def update(self, step: int, moved: bool = True) -> None:
        """Note that a step has changed the weights."""
        self._is_current = self._is_current and not moved

    def refresh(self) -> None:
        """Have the optimizers compute the weights to evaluate, and go back to training."""
        if self._is_current:
            return
        before = [parameter.detach().clone() for parameter in self._parameters]
        self._switch(training=False)
        self._follow()
        self._switch(training=True)
        assign(self._parameters, before)
        self._is_current = self.is_stale = True

    def _switch(self, training: bool) -> None:
        for optimizer in self._optimizers:
            inner = inner_of(optimizer)
            if isinstance(inner, HasModes):
                (inner.train if training else inner.eval)()
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.follow_inner()


def inner_of(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that a strategy has divided among the ranks, or the optimizer itself."""
    return optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer


def average_of(
    average: WeightAverage | None,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    trainer: Trainer,
) -> WeightAverage | None:
    """Return the average that optimizers keep themselves, or the one of the trainer section.

    Raises:
        RefusedError: there are both, or there is none and statistics are to be estimated for it.
    """
    switching = {name: one for name, one in optimizers.items() if isinstance(inner_of(one), HasModes)}
    if average is None and not switching and trainer.average_batch_norm is not None:
        raise no_average(trainer)
    if not switching:
        return average
    if average is not None:
        kind = type(inner_of(next(iter(switching.values())))).__name__
        raise RefusedError(
            f"{kind} averages the weights itself, and trainer.ema_decay and trainer.swa_start would average them again",
            suggestion="Leave them out.",
        )
    return OptimizerAverage(models, switching.values(), trainer.average_batch_norm is not None)


def averages_itself(experiment: Experiment, source: Path) -> bool:
    """Return whether the optimizer section names a class with modes, so that checkpoints hold its average.

    Where that class cannot be imported, whether `source` has an average decides.
    """
    target = experiment.optimizer.target
    if target.startswith("torch.optim.") or key_of("optimizer", target) is not None:
        return False
    try:
        kind = locate(target, experiment.trust, "optimizer")
    except (ImportError, RefusedError):
        return any(source.glob("*.ema.safetensors"))
    return isinstance(kind, type) and issubclass(kind, HasModes)
