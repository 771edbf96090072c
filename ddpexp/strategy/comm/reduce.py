"""Gradient reduction between CPU workers: always ((g0 + g1) + g2) + ... over the ranks, through memory or the backend.

DDP's own reduction leaves the order of the sum to the backend, which chooses it by the layout of the buckets. With
three or more ranks, another host, another launcher or a resume could then change the last bits of the weights. Summed
in the order of the ranks they are the same everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddpexp.distributed.world import World
from ddpexp.errors import RefusedError
from ddpexp.strategy.comm.shared_memory import SharedMemory, share
from ddpexp.strategy.ddp_options import DDPOptions

ALIGNED = 64  # bytes
# Larger gradients are reduced in pieces that stay in the processor's caches: twice as fast, and little memory.
SLOT_BYTES = 1 << 20
# From this many extra bytes to read, it is cheaper if each rank sums one chunk, with a second barrier, than if all
# ranks sum everything. The backend, whose messages cost more, has a limit of its own.
CHUNKED_BYTES = 1 << 20
GATHERED_BYTES = 128 << 10
_HALVES = (torch.float16, torch.bfloat16)


class Reducer(Protocol):
    """Sums gradients over the ranks: all buckets of a backward pass are added, then `finish` writes the sums."""

    def add(self, gradient: Tensor) -> None:
        """Start the reduction of a bucket. Shapes: (num_elements,). Ranks: all, in the same order."""
        ...

    def finish(self) -> None:
        """Write the mean over the ranks into every bucket added. Ranks: all; communicates."""
        ...


def reducer_for(parameters: Sequence[Tensor], options: DDPOptions, world: World) -> Reducer | None:
    """Return the reducer for the gradients of CPU workers, or None for DDP's own reduction.

    DDP's own is used on GPUs, with a comm hook, and for two workers through the backend.
    Ranks: all; communicates.

    Raises:
        RefusedError: `strategy.reduce_through=shared_memory`, but the workers cannot share memory.
    """
    if not parameters or world.device.type != "cpu" or options.comm_hook != "none":
        return None
    memory = common_memory(
        sum(p.numel() * p.element_size() + 2 * ALIGNED for p in parameters), options.reduce_through, world
    )
    if memory is not None:
        return SharedMemoryReducer(memory, world)
    if world.world_size == 2 and not any(p.dtype in _HALVES for p in parameters):
        return None  # a sum of two is the same in either order: DDP's own reduction gives the same bits
    return BackendReducer(world)


def replace_reducer(module: DistributedDataParallel, reducer: Reducer, world: World) -> None:
    """Let `reducer` reduce the buckets of this module instead of DDP."""
    # A lambda has no annotations: torch compares them with classes, and with postponed evaluation they are strings.
    module.register_comm_hook(reducer, lambda reducer, bucket: _hook(reducer, world, bucket))


def common_memory(num_bytes: int, reduce_through: str, world: World) -> SharedMemory | None:
    """Map shared memory for gradients of this size, or pieces of them, into all workers.

    Returns None if gradients are reduced through the backend.

    Ranks: all; communicates.

    Raises:
        RefusedError: `strategy.reduce_through=shared_memory`, but the workers cannot share memory.
    """
    one_host = world.local_world_size == world.world_size
    if reduce_through == "backend" or (reduce_through == "auto" and not one_host):
        return None
    shared = share(world, min(num_bytes, SLOT_BYTES))
    if isinstance(shared, SharedMemory):
        return shared
    if reduce_through == "shared_memory":
        raise RefusedError(
            f"needs shared memory, and the workers have none ({shared})",
            key="strategy.reduce_through",
            value="shared_memory",
            suggestion="Use strategy.reduce_through=auto.",
        )
    if world.is_rank_zero:
        text = "gradients are reduced through the backend, because the workers cannot share memory (%s)"
        logging.getLogger("ddpexp").warning(text, shared)
    return None


def _hook(reducer: Reducer, world: World, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Return the mean of a DDP bucket. Shapes: buckets are (num_elements,).

    The sums of all buckets are written with the last one, which DDP awaits before it reads any. The ranks therefore
    synchronise once per step, not once per bucket.
    """
    gradient = bucket.buffer()
    if gradient.is_sparse:  # of an embedding: gloo gathers the rows and sums them in the order of the ranks
        gradient = world.sum(gradient / world.world_size)
    else:
        reducer.add(gradient)
    if bucket.is_last():
        reducer.finish()
    future: Future[Tensor] = Future()
    future.set_result(gradient)
    return future


class SharedMemoryReducer:
    """Every rank writes its gradients into its slot of the shared memory, and sums all slots after a barrier."""

    def __init__(self, memory: SharedMemory, world: World) -> None:
        """Use the memory; gradients larger than a slot are reduced in several rounds."""
        self.memory = memory
        self._rank = world.rank
        self._size = world.world_size
        self._filled = 0  # bytes of this round
        self._round: list[tuple[Tensor, Sequence[Tensor]]] = []  # each target, and all ranks' parts of it
        # Creating views takes longer than adding them up.
        self._cached: dict[tuple[int, int, int, torch.dtype], Sequence[Tensor]] = {}

    def add(self, gradient: Tensor) -> None:
        """Copy the gradient into this rank's slot, with a round whenever the slot is full."""
        most = self.memory.slot_bytes // gradient.element_size()
        for piece in [gradient] if gradient.numel() <= most else torch.split(gradient, most):
            self.scale(piece, out=self.room(piece))

    def room(self, total: Tensor) -> Tensor:
        """Return the part of this rank's slot for `total`, to be written before `finish` writes the mean into `total`.

        Does a round first if the slot is full. Shapes: both (num_elements,), at most the size of a slot.
        """
        num_bytes = total.numel() * total.element_size()
        if self._filled + num_bytes > self.memory.slot_bytes:
            self.finish()
        parts = self._slot_views(total.numel(), total.dtype)
        self._round.append((total, parts))
        self._filled += -(-num_bytes // ALIGNED) * ALIGNED
        return parts[self._rank]

    def scale(self, gradient: Tensor, out: Tensor) -> None:
        """Write this rank's part of the mean. Shapes: equal."""
        scale(gradient, self._size, out)

    def finish(self) -> None:
        """Synchronise, and write the means of what was added since the last round."""
        self.memory.end_round(self._filled)
        if (self._size - 2) * self._filled >= CHUNKED_BYTES:
            self._sum_in_chunks()
        else:
            for piece, parts in self._round:
                sum_in_order(parts, out=piece)
        self._round.clear()
        self._filled = 0

    def _sum_in_chunks(self) -> None:
        """Sum one chunk of every piece on each rank, and copy the other chunks from the ranks that summed them.

        The bits are those of `_sum` over everything.
        """
        chunked = [
            (piece.tensor_split(self._size), [part.tensor_split(self._size) for part in parts])
            for piece, parts in self._round
        ]
        for chunks, parts in chunked:
            sum_in_order([part[self._rank] for part in parts], out=chunks[self._rank])
            parts[self._rank][self._rank].copy_(chunks[self._rank])
        self.memory.barrier()
        for chunks, parts in chunked:
            for rank, chunk in enumerate(chunks):
                if rank != self._rank:
                    chunk.copy_(parts[rank][rank])

    def _slot_views(self, num_elements: int, dtype: torch.dtype) -> Sequence[Tensor]:
        key = self.memory.half, self._filled, num_elements, dtype
        if key not in self._cached:
            end = self._filled + num_elements * dtype.itemsize
            self._cached[key] = [slot[self._filled : end].view(dtype) for slot in self.memory.slots[self.memory.half]]
        return self._cached[key]


class BackendReducer:
    """Small gradients are gathered by all ranks, which each sum them; of large ones each rank sums one chunk.

    That takes one message fewer than an all-reduce, or as many bytes. Transfers overlap with the backward pass.
    """

    def __init__(self, world: World) -> None:
        """Use the world's process group."""
        self._world, self._size = world, world.world_size
        self._whole: list[tuple[Tensor, Tensor, Any]] = []
        self._chunked: list[tuple[Tensor, Tensor, Tensor, Any]] = []

    def add(self, gradient: Tensor) -> None:
        """Start sending the gradient to all ranks, or its chunk r to rank r."""
        length, size = gradient.numel(), self._size
        if (size - 2) * length * gradient.element_size() < GATHERED_BYTES:
            scale(gradient, size, out=gradient)
            received = gradient.new_empty(size, length)
            gather = self._world.all_gather([as_bytes(row) for row in received], as_bytes(gradient), async_op=True)
            self._whole.append((gradient, received, gather))
        else:
            sent = gradient.new_zeros(size, -(-length // size))
            scale(gradient, size, out=sent.view(-1)[:length])
            received = torch.empty_like(sent)
            exchange = self._world.all_to_all(as_bytes(received), as_bytes(sent), async_op=True)
            self._chunked.append((gradient, sent, received, exchange))

    def finish(self) -> None:
        """Sum what was received, and exchange the sums of chunks."""
        gathers = []
        for _, sent, received, exchange in self._chunked:
            with self._world.times.collective:
                exchange.wait()
            total = torch.empty_like(received[0])
            sum_in_order(received.unbind(), out=total)
            gathers.append(self._world.all_gather([as_bytes(row) for row in sent], as_bytes(total), async_op=True))
        for gradient, received, gather in self._whole:
            with self._world.times.collective:
                gather.wait()
            sum_in_order(received.unbind(), out=gradient)
        for (gradient, sent, _, _), gather in zip(self._chunked, gathers, strict=True):
            with self._world.times.collective:
                gather.wait()
            gradient.copy_(sent.view(-1)[: gradient.numel()])
        self._whole.clear()
        self._chunked.clear()


def scale(gradient: Tensor, world_size: int, out: Tensor) -> None:
    """Write a rank's part of the mean, as DDP does; 16-bit gradients are divided after the sum, to round only once."""
    if gradient.dtype in _HALVES:
        out.copy_(gradient)
    else:
        torch.div(gradient, world_size, out=out)


def sum_in_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """Sum the ranks' parts in the order of the ranks. Shapes: equal."""
    if out.dtype in _HALVES:
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        out.copy_(total.div_(len(parts)))
        return
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out += part


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as bytes, because gloo supports only a few dtypes."""
    return tensor.view(-1).view(torch.uint8)
