"""FSDP's collectives of our own: sums in a fixed order, through shared memory or the backend.

torch lets the backend choose the order of a sum. In the order of the ranks it has the bits of `strategy=ddp`, in the
tree of `trainer.reduction=exact` those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ddpexp.compat.fsdp import AllGather, ReduceScatter
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from ddpexp.strategy.comm.reduce import ALIGNED, as_bytes, scale, sum_in_order
from ddpexp.strategy.comm.shared_memory import SharedMemory
from ddpexp.strategy.exact.exchange import Plan
from ddpexp.strategy.exact.tree import Partial


class Transport(Protocol):
    """Carries gradients: the ranks of each shard get all ranks' values of its chunk."""

    def receive(
        self, chunks: Tensor, write: Callable[[Tensor, Tensor], object]
    ) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """Yield pieces of this rank's chunk: where each begins, and its values on every rank.

        `write(values, out)` writes what is sent. Shapes: `chunks` is (num_shards, n). Ranks: all; communicates.
        """
        ...


class MemoryTransport:
    """Every rank writes its gradients where the others see them."""

    def __init__(self, memory: SharedMemory, world: World, num_shards: int) -> None:
        """Use the memory of all workers of this host."""
        self._memory = memory
        self._rank = world.rank
        self._shard = world.rank % num_shards

    def receive(
        self, chunks: Tensor, write: Callable[[Tensor, Tensor], object]
    ) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """Yield pieces that fit into the memory; see `Transport.receive`."""
        memory = self._memory
        most = memory.slot_bytes // len(chunks) // ALIGNED * ALIGNED // chunks.element_size()
        for begin in range(0, chunks.shape[1], most):
            pieces = chunks[:, begin : begin + most]
            slots = [_part(slot, pieces) for slot in memory.slots[memory.half]]
            write(pieces, slots[self._rank])
            memory.end_round(pieces.numel() * pieces.element_size())
            yield begin, [slot[self._shard] for slot in slots]


class BackendTransport:
    """Every rank sends each chunk to the ranks that hold its shard."""

    def __init__(self, world: World, num_shards: int) -> None:
        """Use the world's process group."""
        self._world = world
        self._size = world.world_size
        self._replicas = world.world_size // num_shards

    def receive(
        self, chunks: Tensor, write: Callable[[Tensor, Tensor], object]
    ) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """Yield the whole chunk; see `Transport.receive`. Overwrites `chunks`."""
        write(chunks, chunks)
        sent = chunks if self._replicas == 1 else chunks.repeat(self._replicas, 1)
        received = torch.empty_like(sent)
        self._world.all_to_all(as_bytes(received), as_bytes(sent))
        yield 0, received.view(self._size, -1).unbind()


class _Allocates:
    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class MeanReduceScatter(_Allocates, ReduceScatter):
    """The mean over the ranks, added up in their order and divided as DDP does."""

    def __init__(self, transport: Transport, world: World, num_shards: int) -> None:
        """Average over the world."""
        self._transport = transport
        self._size = world.world_size
        self._num_shards = num_shards

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Write the mean over the ranks. Shapes: (n,) and (num_shards * n,). Ranks: all; communicates."""
        chunks, output = input_tensor.view(self._num_shards, -1), output_tensor.view(-1)
        for begin, parts in self._transport.receive(chunks, self._write):
            sum_in_order(parts, out=output[begin : begin + len(parts[0])])

    def _write(self, values: Tensor, out: Tensor) -> None:
        scale(values, self._size, out)


class TreeReduceScatter(_Allocates, ReduceScatter):
    """The sum over the micro-batches of all ranks in the tree of `trainer.reduction=exact`.

    Every micro-batch is a leaf for each rank. torch makes views of what a reduce-scatter returns the gradients, so the
    sum is written there after the last micro-batch of a round.
    """

    def __init__(
        self, transport: Transport, world: World, num_shards: int, gradient_accumulation_steps: int, dtype: torch.dtype
    ) -> None:
        """Sum in `dtype` over so many micro-batches of each rank."""
        self._transport = transport
        self._num_shards = num_shards
        self._dtype = dtype
        self._leaves_per_rank = gradient_accumulation_steps
        self._plan = Plan.of(gradient_accumulation_steps * world.world_size, world.world_size)
        self._partials: list[Partial] = []  # one for each rank
        self._num_ranks = world.world_size
        self._shape: tuple[int, torch.device] | None = None  # of a leaf
        self._total: Tensor | None = None  # of this micro-batch, of which the gradients are views
        self._done = 0  # micro-batches of this round
        self.sums_at_once = (
            False  # a micro-batch has one backward pass, which can give out the sum if it is the only one
        )

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Take the gradients of a backward pass. Shapes: (n,) and (num_shards * n,). Ranks: all; communicates.

        Raises:
            DdpexpError: they are those of other parameters than before.
        """
        chunks, output = input_tensor.view(self._num_shards, -1), output_tensor.view(-1)
        if self.sums_at_once and self._leaves_per_rank == 1 and output.dtype == self._dtype:
            for begin, parts in self._transport.receive(chunks, _copy):
                self._plan.sum([[part] for part in parts], out=output[begin : begin + len(parts[0])])
            return
        self._prepare((output.numel(), output.device))
        rooms = [partial.room() for partial in self._partials]
        for begin, parts in self._transport.receive(chunks, _copy):
            for room, part in zip(rooms, parts, strict=True):
                piece = room[begin : begin + len(part)]
                piece.copy_(part) if self._total is None else piece.add_(part)
        if self._total is None:
            self._total = output
        output.zero_()

    def _prepare(self, shape: tuple[int, torch.device]) -> None:
        """Have memory for leaves."""
        if self._shape == shape:
            return
        if self._done or self._total is not None:
            raise DdpexpError(
                "the backward passes of a step reach different parameters of a block, which "
                "trainer.reduction=exact cannot sum with strategy=fsdp",
                suggestion="Let each pass use the whole model, or use strategy=ddp.",
            )
        self._shape, (length, device) = shape, shape
        make = lambda: torch.zeros(length, dtype=self._dtype, device=device)  # noqa: E731
        self._partials = [Partial(make) for _ in range(self._num_ranks)]

    def end_micro_batch(self) -> None:
        """Close the leaves of a micro-batch, if it has used these parameters."""
        if self._total is None:
            return
        for rank, partial in enumerate(self._partials):
            partial.close(rank * self._leaves_per_rank + self._done)
        self._done += 1
        if self._done == self._leaves_per_rank:
            blocks = [partial.take() for partial in self._partials]
            total = self._total if self._total.dtype == self._dtype else torch.empty_like(blocks[0][0])
            self._plan.sum(blocks, out=total)
            if total is not self._total:
                self._total.copy_(total)
            self._done = 0
        self._total = None


class MemoryAllGather(_Allocates, AllGather):
    """Every rank writes its parameters where the others see them."""

    def __init__(self, memory: SharedMemory, world: World, num_shards: int) -> None:
        """Use the memory of all workers of this host."""
        self._memory = memory
        self._rank = world.rank
        self._size = num_shards
        self._first = world.rank // num_shards * num_shards  # rank of this replica

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Write the tensors of this replica's ranks. Shapes: (num_shards * n,) and (n,). Ranks: all; communicates."""
        own, memory = as_bytes(input_tensor), self._memory
        everything = as_bytes(output_tensor).view(self._size, -1)
        for begin in range(0, len(own), memory.slot_bytes):
            piece = own[begin : begin + memory.slot_bytes]
            slots = [slot[: len(piece)] for slot in memory.slots[memory.half]]
            slots[self._rank].copy_(piece)
            memory.end_round(len(piece))
            for shard, target in enumerate(everything[:, begin : begin + len(piece)]):
                rank = self._first + shard
                if rank != self._rank or target.data_ptr() != piece.data_ptr():
                    target.copy_(slots[rank])


def use_collectives(
    block: FSDPModule, reduce_scatter: ReduceScatter, memory: SharedMemory | None, world: World, num_shards: int
) -> None:
    """Have a sharded module communicate by these collectives; the reduce-scatter does the division."""
    block.set_gradient_divide_factor(1.0)
    block.set_custom_reduce_scatter(reduce_scatter)
    if memory is not None:
        block.set_custom_all_gather(MemoryAllGather(memory, world, num_shards))


def _copy(values: Tensor, out: Tensor) -> None:
    out.copy_(values)


def _part(slot: Tensor, like: Tensor) -> Tensor:
    """Return the beginning of a slot with the shape and dtype of `like`."""
    return slot[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)
