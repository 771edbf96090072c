"""The average of the weights, which is evaluated in their place: a moving one (EMA), or that of some steps (SWA)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ddpexp.compat import operators
from ddpexp.compat.modules import BatchNorm
from ddpexp.settings.trainer import Trainer
from ddpexp.train.due import is_due

_FEW_STEPS = 20  # a trial, of which nobody expects an average


def slow_average_warning(decay: float | None, num_steps: int) -> str | None:
    """Return a warning if the average at the end of a run would still be mostly the weights that it began with."""
    if decay is None or num_steps < _FEW_STEPS or decay**num_steps < 0.5:
        return None
    return (
        f"trainer.ema_decay={decay} averages over about {1 / (1 - decay):,.0f} steps, and this run has {num_steps:,}: "
        f"{decay**num_steps:.0%} of the average, which evaluations use, would be the weights that it began with. Use "
        f"trainer.ema_decay={1 - 10 / num_steps:.2g} or trainer.ema_decay=null."
    )


class WeightAverage:
    """The average of the parameters.

    With `decay`, every step moves it towards them by a fraction `1 - decay`. Without, it is the mean of their values
    after every `every` steps, or epoch, from the step `start` on; until then it is what they are.

    Averages of 16-bit parameters are kept in fp32, since 16 bits cannot represent changes of a thousandth. Integer
    parameters have no average: their values of the last step are kept. Nor have buffers; but for the statistics of
    BatchNorm, if `batch_norm` is set, there is room for those of the averages (see `ddpexp.train.average_batch_norm`).
    Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992; Izmailov et al.,
    "Averaging Weights Leads to Wider Optima and Better Generalization", 2018.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        *,
        decay: float | None = None,
        start: int = 0,
        every: int | str = 1,
        steps_per_epoch: int = 1,
        batch_norm: bool = False,
    ) -> None:
        """Start from the current parameters."""
        self._models = models
        self._decay = decay
        self._start = start
        self._every = every
        self._steps_per_epoch = steps_per_epoch
        self.count = 0  # without decay: how many values it is the mean of
        self.is_stale = True  # it has changed since the statistics of BatchNorm were estimated
        self._parameters = [p for module in models.values() for p in module.parameters()]
        self._averages = [p.detach().to(_average_dtype(p), copy=True) for p in self._parameters]
        pairs = list(zip(self._parameters, self._averages, strict=True))
        self._same_dtype = [pair for pair in pairs if _has_average(pair[0]) and pair[0].dtype == pair[1].dtype]
        self._higher_precision = [pair for pair in pairs if pair[0].dtype != pair[1].dtype]
        self._copied = [pair for pair in pairs if not _has_average(pair[0])]
        self.layers = batch_norm_layers(models) if batch_norm else []
        self.statistics = [[buffer.clone() for buffer in layer.buffers()] for layer in self.layers]

    @classmethod
    def from_config(
        cls, models: Mapping[str, nn.Module], trainer: Trainer, steps_per_epoch: int
    ) -> WeightAverage | None:
        """Return the average that the section `trainer` asks for, if any."""
        if not trainer.averages:
            return None
        return cls(
            models,
            decay=trainer.ema_decay,
            start=trainer.swa_start or 0,
            every=trainer.swa_every,
            steps_per_epoch=steps_per_epoch,
            batch_norm=trainer.average_batch_norm is not None,
        )

    def reset(self) -> None:
        """Start again from the current parameters and buffers."""
        self.count, self.is_stale = 0, True
        self._follow()

    def _follow(self) -> None:
        for parameter, average in zip(self._parameters, self._averages, strict=True):
            average.copy_(parameter.detach())
        for layer, kept in zip(self.layers, self.statistics, strict=True):
            for buffer, value in zip(layer.buffers(), kept, strict=True):
                value.copy_(buffer)

    def update(self, step: int, moved: bool = True) -> None:
        """Take in the parameters after a step; `moved` is whether it has changed them. Units: steps done.

        Ranks: the same on all, without communication.
        """
        if self._decay is not None:
            if moved:
                self._move(1 - self._decay)
        elif step >= self._start and is_due(step, self._every, self._steps_per_epoch):
            self.count += 1
            self._move(1 / self.count)

    def _move(self, weight: float) -> None:
        self.is_stale = True
        if self._same_dtype:
            operators.foreach_lerp_([a for _, a in self._same_dtype], [p.detach() for p, _ in self._same_dtype], weight)
        if self._higher_precision:
            operators.foreach_lerp_(
                [a for _, a in self._higher_precision],
                [p.detach().to(a.dtype) for p, a in self._higher_precision],
                weight,
            )
        for parameter, average in self._copied:
            average.copy_(parameter.detach())

    def refresh(self) -> None:
        """Bring it up to date, which `update` has done. Ranks: all; an optimizer's own average may communicate."""

    @property
    def first_step(self) -> int:
        """Return the step after which it first takes in parameters."""
        period = self._steps_per_epoch if isinstance(self._every, str) else self._every
        return 1 if self._decay is not None else max(1, -(-self._start // period)) * period

    @property
    def has_begun(self) -> bool:
        """Return whether it is something else than the current parameters."""
        return self._decay is not None or self.count > 0

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return a model's `state_dict` with averages in place of its parameters, and with their statistics.

        Averages of 16-bit parameters are in fp32.
        """
        if not self.has_begun:
            self._follow()
        averages = {id(p): average for p, average in zip(self._parameters, self._averages, strict=True)}
        for layer, kept in zip(self.layers, self.statistics, strict=True):
            averages |= {id(buffer): value for buffer, value in zip(layer.buffers(), kept, strict=True)}
        module = self._models[name]
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        averaged = {key: averages[id(tensor)] for key, tensor in tensors if id(tensor) in averages}
        return {key: averaged.get(key, value) for key, value in module.state_dict().items()}

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Give the modules' parameters the values of the averages inside the block, in the parameters' dtypes.

        The statistics of BatchNorm are those of the averages, too, where there are any.
        """
        if not self.has_begun:
            yield
            return
        targets = [*self._parameters, *(buffer for layer in self.layers for buffer in layer.buffers())]
        before = [tensor.detach().clone() for tensor in targets]
        try:
            assign(targets, [*self._averages, *(value for kept in self.statistics for value in kept)])
            yield
        finally:
            assign(targets, before)


@torch.no_grad()
def assign(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into tensors: a strategy may refer to their memory, so they cannot be replaced."""
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def batch_norm_layers(models: Mapping[str, nn.Module]) -> list[BatchNorm]:
    """Return the layers that keep statistics of batches."""
    return [
        layer
        for root in models.values()
        for layer in root.modules()
        if isinstance(layer, BatchNorm) and layer.track_running_stats
    ]


def _has_average(parameter: Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _average_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which a parameter's average is kept."""
    narrow = parameter.is_floating_point() and parameter.dtype.itemsize < torch.float32.itemsize
    return torch.float32 if narrow else parameter.dtype
