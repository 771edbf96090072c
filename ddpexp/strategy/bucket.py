"""A small model's gradients in one bucket, which the workers of one host sum when a micro-batch ends.

DDP's reducer sums while backward goes on, for which it watches every gradient. Of a model that fits into one bucket
nothing can be summed before the last gradient is there, and the watching takes longer than the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import is_lazy

from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from ddpexp.strategy.comm.flat import Layout
from ddpexp.strategy.comm.reduce import SharedMemoryReducer
from ddpexp.strategy.options import Options
from ddpexp.strategy.replica import take_rank_zeros

_MIB = 1 << 20


class Bucket:
    """The gradients of one model on this rank. Every rank makes one, of the same parameters in the same order."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], reducer: SharedMemoryReducer, world: World) -> None:
        """Lay the gradients out, those of each kind of number in a flat tensor of their own."""
        self.last: bool | None = (
            None  # whether the micro-batch that is going on is a step's last one; None: between them
        )
        self.training = True
        self.reducer, self._world = reducer, world
        self._kinds = [_Kind(group) for group in _by_kind(parameters.values())]
        # One parameter stands for all: any backward pass that is worth its name reaches it.
        list(parameters.values())[-1].register_post_accumulate_grad_hook(self._check_inside_micro_batch)  # type: ignore[no-untyped-call]

    @classmethod
    def fits(cls, parameters: Mapping[str, nn.Parameter], options: Options, slot_bytes: int) -> bool:
        """Tell whether this does what DDP would, with these options, for a model of these parameters."""
        if options.static_graph or options.find_unused_parameters or not options.gradient_as_bucket_view:
            return False
        if any(is_lazy(parameter) or parameter.is_complex() for parameter in parameters.values()):
            return False
        sizes = [Layout(group).length * group[0].element_size() for group in _by_kind(parameters.values())]
        return sum(sizes) <= options.bucket_cap_mb * _MIB and max(sizes) <= slot_bytes

    def fill(self) -> bool:
        """Bring the gradients that have come since the last sum to the other ranks; false: none have come."""
        if not any(kind.is_new() for kind in self._kinds):
            return False
        for kind in self._kinds:
            kind.write(self.reducer)
        return True

    def give(self) -> None:
        """Give the parameters the sums as gradients. Ranks: all; communicates where gradients are sparse."""
        for kind in self._kinds:
            for parameter in kind.give():
                assert parameter.grad is not None
                parameter.grad = self._world.sum(parameter.grad / self._world.world_size)

    def _check_inside_micro_batch(self, _parameter: nn.Parameter) -> None:
        if self.last is None and self.training:
            raise DdpexpError(
                "the task's train_step runs backward outside of `with update.micro_batch(last):`, at whose end the "
                "workers sum their gradients: these would stay each worker's own. Enclose it."
            )


class _Kind:
    """The gradients of one kind of number."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._layout = Layout(parameters)
        self._sum = torch.zeros(self._layout.length, dtype=parameters[0].dtype)
        self._places = self._layout.views(self._sum)  # a parameter's gradient lies here once it is summed
        self._version = self._sum._version

    def is_new(self) -> bool:
        """Tell whether backward has made or changed a gradient."""
        moved = self._sum._version != self._version
        for parameter, place in zip(self._parameters, self._places, strict=True):
            gradient = parameter.grad
            if gradient is not None and (moved or gradient is not place):
                return True
        return False

    def write(self, reducer: SharedMemoryReducer) -> None:
        """Write this rank's share of the mean, but for sparse gradients."""
        room = reducer.room(self._sum)
        gradients, places = [], []
        for parameter, place in zip(self._parameters, self._layout.views(room), strict=True):
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse:
                gradients.append(gradient)
                places.append(place)
        if gradients:
            torch._foreach_copy_(places, gradients)
        reducer.scale(room, out=room)

    def give(self) -> list[nn.Parameter]:
        """Give every gradient its sum; return the parameters whose gradients are sparse."""
        sparse = []
        for parameter, place in zip(self._parameters, self._places, strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                sparse.append(parameter)
            elif gradient is not place:
                parameter.grad = place
        self._version = self._sum._version
        return sparse


def _by_kind(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    kinds: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(parameter.dtype, []).append(parameter)
    return list(kinds.values())


class WithRankZerosBuffers(nn.Module):
    """A model that begins each step with rank zero's buffers, as DDP's does."""

    def __init__(self, module: nn.Module, bucket: Bucket, world: World) -> None:
        """Wrap the model that the bucket is for."""
        super().__init__()
        self.module = module
        self._bucket, self._world = bucket, world
        self._due = True

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the model. Ranks: all; communicates in the first pass after one whose gradient was to be reduced."""
        if self._due:
            buffers = list(self.module.buffers())
            with torch.no_grad(), _unsafe_preserve_version_counter(tuple(buffers)):
                take_rank_zeros(buffers, self._world)
        self._due = torch.is_grad_enabled() and self._bucket.last is not False
        return self.module(*inputs, **named)
