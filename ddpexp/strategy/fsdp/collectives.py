"""FSDP's collectives between CPU workers: sums in the order of the ranks, through shared memory or the backend.

torch lets the backend choose the order of a sum. In the order of the ranks it has the bits of `strategy=ddp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from ddpexp.distributed.world import World
from ddpexp.strategy.comm.reduce import ALIGNED, as_bytes, scale, sum_in_order
from ddpexp.strategy.comm.shared_memory import SharedMemory


def use_ordered_collectives(module: FSDPModule, memory: SharedMemory | None, world: World) -> None:
    """Have a sharded module take the mean of gradients in the order of the ranks; without memory, by the backend."""
    module.set_gradient_divide_factor(1.0)  # the mean is taken here, divided as DDP does
    if memory is None:
        module.set_custom_reduce_scatter(BackendReduceScatter(world))
    else:
        module.set_custom_reduce_scatter(MemoryReduceScatter(memory, world))
        module.set_custom_all_gather(MemoryAllGather(memory, world))


class _Allocates:
    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class BackendReduceScatter(_Allocates, ReduceScatter):
    """Every rank gets all ranks' parts of its chunk, and sums them."""

    def __init__(self, world: World) -> None:
        """Use the world's size."""
        self._size = world.world_size

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Write the mean over the ranks. Shapes: (n,) and (world_size * n,). Ranks: all; communicates."""
        scale(input_tensor, self._size, out=input_tensor)
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(as_bytes(received), as_bytes(input_tensor), group=group)
        sum_in_order(received.view(self._size, -1).unbind(), out=output_tensor)


class MemoryReduceScatter(_Allocates, ReduceScatter):
    """Every rank writes its gradients where the others see them, and sums its own chunk."""

    def __init__(self, memory: SharedMemory, world: World) -> None:
        """Use the memory of all workers of this host."""
        self._memory, self._rank, self._size = memory, world.rank, world.world_size

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Write the mean over the ranks. Shapes: (n,) and (world_size * n,). Ranks: all; communicates."""
        chunks, memory = input_tensor.view(self._size, -1), self._memory
        most = memory.slot_bytes // self._size // ALIGNED * ALIGNED // input_tensor.element_size()
        for begin in range(0, chunks.shape[1], most):
            pieces = chunks[:, begin : begin + most]
            slots = [_part(slot, pieces) for slot in memory.slots[memory.half]]
            scale(pieces, self._size, out=slots[self._rank])
            memory.end_round(pieces.numel() * pieces.element_size())
            out = output_tensor.view(-1)[begin : begin + most]
            sum_in_order([slot[self._rank] for slot in slots], out=out)


class MemoryAllGather(_Allocates, AllGather):
    """Every rank writes its parameters where the others see them."""

    def __init__(self, memory: SharedMemory, world: World) -> None:
        """Use the memory of all workers of this host."""
        self._memory, self._rank, self._size = memory, world.rank, world.world_size

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Write all ranks' tensors. Shapes: (world_size * n,) and (n,). Ranks: all; communicates."""
        own, memory = as_bytes(input_tensor), self._memory
        everything = as_bytes(output_tensor).view(self._size, -1)
        for begin in range(0, len(own), memory.slot_bytes):
            piece = own[begin : begin + memory.slot_bytes]
            slots = [slot[: len(piece)] for slot in memory.slots[memory.half]]
            slots[self._rank].copy_(piece)
            memory.end_round(len(piece))
            for rank, slot in enumerate(slots):
                target = everything[rank, begin : begin + len(piece)]
                if rank != self._rank or target.data_ptr() != piece.data_ptr():
                    target.copy_(slot)


def _part(slot: Tensor, like: Tensor) -> Tensor:
    """Return the beginning of a slot with the shape and dtype of `like`."""
    return slot[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)
