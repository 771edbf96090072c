"""The ranks that compute layers together, and their collectives inside forward and backward passes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ddpexp.compat.dtensor import flattened
from ddpexp.distributed.world import World
from ddpexp.strategy.base import Shard
from ddpexp.strategy.comm.reduce import as_bytes

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class TensorGroup:
    """Neighbouring ranks, which see the same batches. The ranks with the same place in their groups share the data."""

    rank: int  # in this group
    size: int
    world: World | None = None  # these ranks as a world of their own; None: a plan, in which nobody communicates
    adds_halves: bool = True  # whether the backend adds 16-bit numbers
    mesh: DeviceMesh | None = None  # of the dimensions replicate, shard, tensor, if other layers are sharded

    @classmethod
    def join(cls, world: World, size: int, dp_replicate_size: int) -> TensorGroup:
        """Divide the world into groups. Ranks: all; communicates."""
        sizes = (dp_replicate_size, world.world_size // size // dp_replicate_size, size)
        mesh = init_device_mesh(world.device.type, sizes, mesh_dim_names=("replicate", "shard", "tensor"))
        rank = world.rank % size
        own = replace(world, rank=rank, world_size=size, memory=None, group=mesh["tensor"].get_group())
        return cls(rank, size, own, world.device.type != "cpu", mesh)

    def mesh_of(self, dimensions: tuple[str, ...]) -> DeviceMesh:
        """Return the ranks among which this rank's part of the model is sharded, replicated, or both."""
        assert self.mesh is not None
        return self.mesh[dimensions]

    def data_world(self, world: World) -> World:
        """Return the ranks among which the data are divided, as one of them sees it."""
        assert self.mesh is not None
        size = world.world_size // self.size
        if size == 1:
            return replace(world, rank=0, world_size=1, local_world_size=1, local_rank=0)
        group = flattened(self.mesh["replicate", "shard"], "data").get_group()
        return replace(world, rank=world.rank // self.size, world_size=size, group=group)

    def sum(self, tensor: Tensor) -> None:
        """Sum over the group, in place. Ranks: those of the group; communicates."""
        if self.world is not None:
            self.world.sum(tensor)

    def add_up(self, tensor: Tensor) -> Tensor:
        """Return the sum over the group in new memory. Ranks: those of the group; communicates."""
        halves = tensor.dtype in HALVES and not self.adds_halves
        total = tensor.float() if halves else tensor.contiguous().clone()
        self.sum(total)
        return total.to(tensor.dtype)

    def side_by_side(self, tensor: Tensor) -> Tensor:
        """Return the last dimensions of all ranks, in their order. Ranks: those of the group; communicates."""
        if self.world is None:
            return torch.cat([tensor] * self.size, -1)
        everything = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self.world.all_gather(everything, tensor.contiguous())
        return torch.cat(everything, -1)

    def whole_rows(self, shard: Shard, columns_of: Callable[[int], Sequence[range]]) -> Shard:
        """Return some rows of a tensor whose columns are divided: each rank gets others. Ranks: all of the group."""
        local = shard.tensor.detach().contiguous()
        bounds = [rank * len(local) // self.size for rank in range(self.size + 1)]
        counts = [end - begin for begin, end in pairwise(bounds)]
        own, row_bytes = counts[self.rank], local.shape[1] * local.element_size()
        received = local.new_empty(self.size, own, local.shape[1])
        assert self.world is not None
        self.world.all_to_all(
            as_bytes(received), as_bytes(local),
            [own * row_bytes] * self.size, [count * row_bytes for count in counts],
        )  # fmt: skip
        rows = local.new_empty(own, shard.shape[1])
        for rank, values in enumerate(received):
            ranges = columns_of(rank)
            for columns, part in zip(ranges, values.split([len(part) for part in ranges], 1), strict=True):
                rows[:, columns.start : columns.stop] = part
        return Shard(rows, shard.shape, shard.blocks[0].start + bounds[self.rank], shard.replica)

    def own(self, tensor: Tensor) -> Tensor:
        """Return this rank's share of the last dimension."""
        return tensor.chunk(self.size, -1)[self.rank]


class Operation:
    """A function of a tensor that communicates: to torch's compiler an operation that it does not look into.

    It would cut a graph at the marks of time around a collective.
    """

    def __init__(
        self, name: str, group: TensorGroup, function: Callable[[Tensor], Tensor], shape: Callable[[Tensor], Tensor]
    ) -> None:
        """Define it for one group; `shape` makes a tensor like that which the function returns, in new memory."""
        self._function = self._opaque = function
        if group.world is not None:
            number = re.sub(r"\W", "_", group.world.group.group_name)
            self._opaque = opaque = torch.library.custom_op(
                f"ddpexp::{name}_{number}", function, mutates_args=(), schema="(Tensor x) -> Tensor"
            )
            opaque.register_fake(shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Call it. Ranks: those of the group; communicates."""
        return self._opaque(x) if torch.compiler.is_compiling() else self._function(x)


class Exchanges:
    """The tensors that the ranks of a group exchange around the layers that they divide, forward and backward."""

    def __init__(self, group: TensorGroup) -> None:
        """Define the operations of a group."""
        size = group.size
        self._add_up = Operation("add_up", group, group.add_up, contiguous_like)
        self._own = group.own
        self._side_by_side = Operation(
            "side_by_side", group, group.side_by_side, lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] * size)
        )

    def copied(self, x: Tensor) -> Tensor:
        """Return the same input for the layers of all ranks: its gradient is the sum of theirs."""
        return with_gradient(x, _same, self._add_up)

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum of what the ranks have computed: each of their summands has its gradient.

        Ranks: those of the group; communicates.
        """
        return with_gradient(x, self._add_up, _same)

    def joined(self, x: Tensor) -> Tensor:
        """Return the last dimensions of all ranks side by side. Ranks: those of the group; communicates."""
        return with_gradient(x, self._side_by_side, self._own)


def contiguous_like(x: Tensor) -> Tensor:
    """Return new memory of the same shape."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def with_gradient(x: Tensor, function: Callable[[Tensor], Tensor], gradient: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `function(x)`, whose backward pass turns its gradient into `gradient(...)`; both may communicate."""
    result: Tensor = _WithGradient.apply(x, function, gradient)  # type: ignore[no-untyped-call]
    return result


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor], gradient: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.gradient = gradient
        return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient(gradient), None, None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)
