"""The exponential moving average of the weights, which is evaluated in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class EMA:
    """Exponential moving average of the parameters: every step moves it by a share of `1 - decay` towards them.

    Averages of 16-bit parameters are kept in fp32: a share of a thousandth is less than what 16 bits can tell apart.
    Buffers are not averaged, and of parameters of whole numbers, which have no average, it holds the values of the last
    step.
    Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992.
    """

    def __init__(self, models: Mapping[str, nn.Module], decay: float) -> None:
        """Begin with the parameters as they are."""
        self._models = models
        self._share = 1 - decay
        self._parameters = [p for module in models.values() for p in module.parameters()]
        self._averages = [p.detach().to(_kind(p), copy=True) for p in self._parameters]
        pairs = list(zip(self._parameters, self._averages, strict=True))
        self._alike = [pair for pair in pairs if _has_average(pair[0]) and pair[0].dtype == pair[1].dtype]
        self._wider = [pair for pair in pairs if pair[0].dtype != pair[1].dtype]
        self._copied = [pair for pair in pairs if not _has_average(pair[0])]

    def begin(self) -> None:
        """Begin anew with the parameters as they are."""
        for parameter, average in zip(self._parameters, self._averages, strict=True):
            average.copy_(parameter.detach())

    def update(self) -> None:
        """Move towards the parameters, once a step. Ranks: the same on all, without communication."""
        if self._alike:
            torch._foreach_lerp_([a for _, a in self._alike], [p.detach() for p, _ in self._alike], self._share)
        if self._wider:
            torch._foreach_lerp_(
                [a for _, a in self._wider], [p.detach().to(a.dtype) for p, a in self._wider], self._share
            )
        for parameter, average in self._copied:
            average.copy_(parameter.detach())

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return a model's state with averages in the place of its parameters, under the names of its `state_dict`.

        An average of a 16-bit parameter is in fp32.
        """
        by_place = {id(p): average for p, average in zip(self._parameters, self._averages, strict=True)}
        module = self._models[name]
        kept = {key: by_place[id(p)] for key, p in module.named_parameters(remove_duplicate=False)}
        return {key: kept.get(key, value) for key, value in module.state_dict().items()}

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Give the modules the averages, in the parameters' own kinds of numbers, for a while."""
        weights = [parameter.data for parameter in self._parameters]
        try:
            for parameter, average in zip(self._parameters, self._averages, strict=True):
                parameter.data = average.to(
                    parameter.dtype
                )  # the average's own memory, where it is of that kind already
            yield
        finally:
            for parameter, weight in zip(self._parameters, weights, strict=True):
                parameter.data = weight


def _has_average(parameter: Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _kind(parameter: Tensor) -> torch.dtype:
    """Return the kind of number that a parameter's average is kept in."""
    narrow = parameter.is_floating_point() and parameter.dtype.itemsize < torch.float32.itemsize
    return torch.float32 if narrow else parameter.dtype
