"""The exponential moving average of the weights, which is evaluated in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """What the parameters were on average of late: every step moves it by a share of `1 - decay` towards them.

    Buffers are not averaged. Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992.
    """

    def __init__(self, models: Mapping[str, nn.Module], decay: float) -> None:
        """Begin with the parameters as they are."""
        self._models = models
        self._share = 1 - decay
        self._parameters = [p for module in models.values() for p in module.parameters()]
        self._averages = [p.detach().clone() for p in self._parameters]

    def begin(self) -> None:
        """Begin anew with the parameters as they are."""
        torch._foreach_copy_(self._averages, [p.detach() for p in self._parameters])

    def update(self) -> None:
        """Move towards the parameters, once a step. Ranks: the same on all, without communication."""
        torch._foreach_lerp_(self._averages, [p.detach() for p in self._parameters], self._share)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return a model's state with averages in the place of its parameters, under the names of its `state_dict`."""
        by_place = {id(p): average for p, average in zip(self._parameters, self._averages, strict=True)}
        module = self._models[name]
        kept = {key: by_place[id(p)] for key, p in module.named_parameters(remove_duplicate=False)}
        return {key: kept.get(key, value) for key, value in module.state_dict().items()}

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Exchange the modules' parameters with the averages for a while, by exchanging their memory."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for parameter, average in zip(self._parameters, self._averages, strict=True):
            parameter.data, average.data = average.data, parameter.data
