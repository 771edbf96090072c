"""A model without memory, and where the initial values of its tensors come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ddpexp.strategy.init.empty import Resets, build_empty
from ddpexp.strategy.init.replay import record
from ddpexp.strategy.replica import modules_of

RESET = (
    "strategy.init=reset_parameters: the initial weights are drawn by the reset_parameters of each module in turn, so "
    "they are not those of strategy.init=whole or of another strategy, and what the model does to its parameters after "
    "building them has no effect"
)
Models = Mapping[str, nn.Module]


class Construction:
    """What a factory builds, first with tensors on torch's meta device."""

    def __init__(
        self, factory: Callable[[], Any], init: Literal["replay", "reset_parameters"], draws_values: bool
    ) -> None:
        """Build it as strategy.init says; without `draws_values` all values will be loaded, and are NaN before.

        Raises:
            RefusedError: the construction depends on values of tensors.
        """
        self._recording = None
        if init == "replay" and draws_values:
            self.built, self._recording = record(factory)
        else:
            self.built = build_empty(factory, f"strategy.init={init}")
        self.models: Models = modules_of(self.built)
        self._resets = Resets(self.models) if init == "reset_parameters" and draws_values else None
        self._recorded = {name: tensor.detach() for name, tensor in tensors_of(self.models)}  # as they are built
        self._given = {name: tensor for name, tensor in self._recorded.items() if tensor.device.type != "meta"}
        for module in self.models.values():
            module.to("meta")

    def allocate(self, device: torch.device) -> None:
        """Give the tensors memory, after the caller has left to other ranks what they hold."""
        with _parameters_stay_themselves():
            for module in self.models.values():
                module.to_empty(device=device)

    @torch.no_grad()
    def fill(self, take: Callable[[str, Tensor, Tensor], None]) -> None:
        """Call `take(name, tensor, values)` for each tensor, with its whole values, which are dropped afterwards."""
        held = dict(tensors_of(self.models))

        def give(name: str, values: Tensor) -> None:
            if name in held:  # a tied one by one name
                take(name, held[name], values)

        if self._recording is not None:
            to_replay = {name: tensor for name, tensor in self._recorded.items() if name not in self._given}
            self._recording.replay(to_replay, torch.device("cpu"), give)
        elif self._resets is not None:
            self._resets.draw(give)
        else:
            _fill_with_nan(tensor for name, tensor in held.items() if name not in self._given)
        for name, tensor in self._given.items():
            give(name, tensor)


def tensors_of(models: Models) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer once, with its name."""
    for model, module in models.items():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield f"{model}.{name}", tensor


def _fill_with_nan(tensors: Iterable[Any]) -> None:
    """Mark values that are to be loaded: what is forgotten ends the run at its first step."""
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor
        local.fill_(math.nan if local.is_floating_point() or local.is_complex() else 0)


@contextmanager
def _parameters_stay_themselves() -> Iterator[None]:
    """Have `Module.to_empty` change parameters in place inside the block, so that tied ones stay tied."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
