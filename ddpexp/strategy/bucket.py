"""The gradients of a small model in one bucket, which the workers of one host sum at the end of a micro-batch.

DDP's reducer overlaps reduction with the backward pass, for which it hooks every gradient. If the model fits into one
bucket, there is nothing to overlap, and the hooks take longer than the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ddpexp.compat import operators
from ddpexp.compat.autograd import version
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from ddpexp.strategy.comm.flat import Layout
from ddpexp.strategy.comm.reduce import SharedMemoryReducer
from ddpexp.strategy.ddp_options import DDPOptions

_MIB = 1 << 20


class Bucket:
    """The gradients of one model on this rank. Every rank has one, of the same parameters in the same order."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], reducer: SharedMemoryReducer, world: World) -> None:
        """Allocate a flat tensor for the gradients of each dtype."""
        self.last: bool | None = None  # whether the current micro-batch is the last of its step; None: between them
        self.training = True
        self.reducer, self._world = reducer, world
        self._groups = [_DtypeGroup(group) for group in _by_dtype(parameters.values())]
        # One hook is enough: any real backward pass reaches the last parameter.
        list(parameters.values())[-1].register_post_accumulate_grad_hook(self._check_inside_micro_batch)  # type: ignore[no-untyped-call]

    @classmethod
    def fits(cls, parameters: Mapping[str, nn.Parameter], options: DDPOptions, slot_bytes: int) -> bool:
        """Return whether a bucket can replace DDP, with these options, for a model with these parameters."""
        if options.static_graph or options.find_unused_parameters or not options.gradient_as_bucket_view:
            return False
        if any(is_lazy(parameter) or parameter.is_complex() for parameter in parameters.values()):
            return False
        sizes = [Layout(group).length * group[0].element_size() for group in _by_dtype(parameters.values())]
        return sum(sizes) <= options.bucket_cap_mb * _MIB and max(sizes) <= slot_bytes

    def fill(self) -> bool:
        """Write the gradients where the other ranks can read them; return whether there are new ones."""
        if not any(group.is_new() for group in self._groups):
            return False
        for group in self._groups:
            group.write(self.reducer)
        return True

    def assign(self) -> None:
        """Assign the sums to the parameters as gradients. Ranks: all; communicates if gradients are sparse."""
        for group in self._groups:
            for parameter in group.assign():
                assert parameter.grad is not None
                parameter.grad = self._world.sum(parameter.grad / self._world.world_size)

    def _check_inside_micro_batch(self, _parameter: nn.Parameter) -> None:
        if self.last is None and self.training:
            raise DdpexpError(
                "the task's train_step runs backward outside of `with update.micro_batch(last):`, at whose end the "
                "workers sum their gradients: these would stay each worker's own",
                suggestion="Enclose it.",
            )


class _DtypeGroup:
    """The gradients of one dtype."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._layout = Layout(parameters)
        self._sum = torch.zeros(self._layout.length, dtype=parameters[0].dtype)
        self._views = self._layout.views(self._sum)  # the gradients of the parameters, once they are summed
        self._version = version(self._sum)

    def is_new(self) -> bool:
        """Return whether backward has made or changed a gradient."""
        modified = version(self._sum) != self._version
        for parameter, view in zip(self._parameters, self._views, strict=True):
            gradient = parameter.grad
            if gradient is not None and (modified or gradient is not view):
                return True
        return False

    def write(self, reducer: SharedMemoryReducer) -> None:
        """Write this rank's part of the mean, except for sparse gradients."""
        room = reducer.room(self._sum)
        gradients, targets = [], []
        for parameter, view in zip(self._parameters, self._layout.views(room), strict=True):
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse:
                gradients.append(gradient)
                targets.append(view)
        if gradients:
            operators.foreach_copy_(targets, gradients)
        reducer.scale(room, out=room)

    def assign(self) -> list[nn.Parameter]:
        """Assign every gradient its sum; return the parameters whose gradients are sparse."""
        sparse = []
        for parameter, view in zip(self._parameters, self._views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                sparse.append(parameter)
            elif gradient is not view:
                parameter.grad = view
        self._version = version(self._sum)
        return sparse


def _by_dtype(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.dtype, []).append(parameter)
    return list(groups.values())
