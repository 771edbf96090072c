"""The exponential moving average of the weights, which is evaluated instead of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class EMA:
    """Exponential moving average of the parameters: every step moves it towards them by a fraction `1 - decay`.

    Averages of 16-bit parameters are kept in fp32, since 16 bits cannot represent changes of a thousandth. Buffers are
    not averaged. Integer parameters have no average: their values of the last step are kept.
    Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992.
    """

    def __init__(self, models: Mapping[str, nn.Module], decay: float) -> None:
        """Start from the current parameters."""
        self._models = models
        self._weight = 1 - decay
        self._parameters = [p for module in models.values() for p in module.parameters()]
        self._averages = [p.detach().to(_average_dtype(p), copy=True) for p in self._parameters]
        pairs = list(zip(self._parameters, self._averages, strict=True))
        self._same_dtype = [pair for pair in pairs if _has_average(pair[0]) and pair[0].dtype == pair[1].dtype]
        self._higher_precision = [pair for pair in pairs if pair[0].dtype != pair[1].dtype]
        self._copied = [pair for pair in pairs if not _has_average(pair[0])]

    def reset(self) -> None:
        """Start again from the current parameters."""
        for parameter, average in zip(self._parameters, self._averages, strict=True):
            average.copy_(parameter.detach())

    def update(self) -> None:
        """Move towards the parameters; called once a step. Ranks: the same on all, without communication."""
        if self._same_dtype:
            torch._foreach_lerp_(
                [a for _, a in self._same_dtype], [p.detach() for p, _ in self._same_dtype], self._weight
            )
        if self._higher_precision:
            torch._foreach_lerp_(
                [a for _, a in self._higher_precision],
                [p.detach().to(a.dtype) for p, a in self._higher_precision],
                self._weight,
            )
        for parameter, average in self._copied:
            average.copy_(parameter.detach())

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return a model's `state_dict` with averages in place of its parameters.

        Averages of 16-bit parameters are in fp32.
        """
        averages = {id(p): average for p, average in zip(self._parameters, self._averages, strict=True)}
        module = self._models[name]
        averaged = {key: averages[id(p)] for key, p in module.named_parameters(remove_duplicate=False)}
        return {key: averaged.get(key, value) for key, value in module.state_dict().items()}

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Give the modules' parameters the values of the averages inside the block, in the parameters' dtypes."""
        weights = [parameter.detach().clone() for parameter in self._parameters]
        try:
            self._assign(self._averages)
            yield
        finally:
            self._assign(weights)

    @torch.no_grad()
    def _assign(self, values: Sequence[Tensor]) -> None:
        """Copy values into the parameters: a strategy may refer to their memory, so they cannot be replaced."""
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)


def _has_average(parameter: Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _average_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which a parameter's average is kept."""
    narrow = parameter.is_floating_point() and parameter.dtype.itemsize < torch.float32.itemsize
    return torch.float32 if narrow else parameter.dtype
