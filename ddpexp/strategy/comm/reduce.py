"""The gradient's reduction between CPU workers: always ((g0 + g1) + g2) + ... over the ranks, whatever carries it.

DDP's own reduction leaves the order of the sum to the backend, which chooses by the layout of the buckets: another
host, another launcher or a fresh start changes the last bits of the weights at three ranks and more. In the order of
the ranks they are the same everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddpexp.distributed.world import World
from ddpexp.errors import RefusedError
from ddpexp.strategy.comm.shared_memory import SharedMemory, share
from ddpexp.strategy.options import Options

ALIGNED = 64  # bytes
SLOT_BYTES = (
    1 << 20
)  # larger gradients go in pieces, which stay in the processor's caches: twice as fast, and little memory
CHUNKED_BYTES = (
    1 << 20
)  # what a rank reads more by summing all than by summing a part, when a second meeting is cheaper
GATHERED_BYTES = 128 << 10  # the same for the backend, whose messages cost more
_HALVES = (torch.float16, torch.bfloat16)


class Reducer(Protocol):
    """What brings the ranks' gradients together: first all buckets of a backward pass go in, then all sums come out."""

    def add(self, gradient: Tensor) -> None:
        """Send this rank's bucket on its way. Shapes: (elements,). Ranks: all, in the same order."""
        ...

    def finish(self) -> None:
        """Fill every bucket that was added with the mean over the ranks. Ranks: all; communicates."""
        ...


def reducer_for(parameters: Sequence[Tensor], options: Options, world: World) -> Reducer | None:
    """Choose what brings the gradients of CPU workers together; None: DDP's own reduction.

    That is for GPUs, for gradients that are compressed, and for two workers through the backend.
    Ranks: all; communicates.

    Raises:
        RefusedError: `strategy.reduce_through=shared_memory` where the workers cannot share memory.
    """
    if not parameters or world.device.type != "cpu" or options.comm_hook != "none":
        return None
    memory = common_memory(sum(p.numel() * p.element_size() + 2 * ALIGNED for p in parameters), options, world)
    if memory is not None:
        return SharedMemoryReducer(memory, world)
    if world.world_size == 2 and not any(p.dtype in _HALVES for p in parameters):
        return None  # a sum of two is the same in either order: DDP's own reduction gives the same bits
    return BackendReducer(world)


def take_over(module: DistributedDataParallel, reducer: Reducer, world: World) -> None:
    """Let `reducer` reduce this module's buckets, and not DDP."""
    # Not a function with annotations: torch compares them with classes, and ours are texts.
    module.register_comm_hook(reducer, lambda reducer, bucket: _hook(reducer, world, bucket))


def common_memory(num_bytes: int, options: Options, world: World) -> SharedMemory | None:
    """Map slots for so many bytes, or for pieces of them, into all workers.

    None where gradients go through the backend.

    Ranks: all; communicates.

    Raises:
        RefusedError: `strategy.reduce_through=shared_memory` where the workers cannot share memory.
    """
    one_host = world.local_world_size == world.world_size
    if options.reduce_through == "backend" or (options.reduce_through == "auto" and not one_host):
        return None
    shared = share(world, min(num_bytes, SLOT_BYTES))
    if isinstance(shared, SharedMemory):
        return shared
    if options.reduce_through == "shared_memory":
        raise RefusedError(
            f"strategy.reduce_through=shared_memory, but the workers cannot share memory ({shared}). Use "
            "strategy.reduce_through=auto."
        )
    if world.is_rank_zero:
        text = "gradients go through the backend, for the workers cannot share memory (%s)"
        logging.getLogger("ddpexp").warning(text, shared)
    return None


def _hook(reducer: Reducer, world: World, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Give DDP a bucket's mean. Shapes: buckets are (elements,).

    The sums of all buckets come with the last one, which DDP waits for before it reads any: so the ranks meet once a
    step, and not once a bucket.
    """
    gradient = bucket.buffer()
    if gradient.is_sparse:  # an embedding's: gloo gathers the rows and adds them up in the order of the ranks
        gradient = world.sum(gradient / world.world_size)
    else:
        reducer.add(gradient)
    if bucket.is_last():
        reducer.finish()
    future: Future[Tensor] = Future()
    future.set_result(gradient)
    return future


class SharedMemoryReducer:
    """Every rank writes its gradients into its slot, and sums all slots when all have written."""

    def __init__(self, memory: SharedMemory, world: World) -> None:
        """Use the memory; its slots may be smaller than the gradients, which then go in several rounds."""
        self.memory = memory
        self._rank = world.rank
        self._size = world.world_size
        self._filled = 0  # bytes of this round
        self._round: list[tuple[Tensor, Sequence[Tensor]]] = []  # what is to be filled, and all ranks' parts of it
        self._known: dict[
            tuple[int, int, int, torch.dtype], Sequence[Tensor]
        ] = {}  # making views takes longer than adding

    def add(self, gradient: Tensor) -> None:
        """Copy the gradient into this rank's slot, as far as there is room; then a round makes some."""
        most = self.memory.slot_bytes // gradient.element_size()
        for piece in [gradient] if gradient.numel() <= most else torch.split(gradient, most):
            self.scale(piece, out=self.room(piece))

    def room(self, total: Tensor) -> Tensor:
        """Return the place in this rank's slot for its part of `total`, to be written before `finish` fills `total`.

        A round makes room where there is too little. Shapes: both (elements,), no more than a slot holds.
        """
        num_bytes = total.numel() * total.element_size()
        if self._filled + num_bytes > self.memory.slot_bytes:
            self.finish()
        places = self._places(total.numel(), total.dtype)
        self._round.append((total, places))
        self._filled += -(-num_bytes // ALIGNED) * ALIGNED
        return places[self._rank]

    def scale(self, gradient: Tensor, out: Tensor) -> None:
        """Write a rank's share of the mean. Shapes: both alike."""
        _scale(gradient, self._size, out)

    def finish(self) -> None:
        """Meet, and sum what was added since the last time into the gradients it came from."""
        self.memory.end_round(self._filled)
        if (self._size - 2) * self._filled >= CHUNKED_BYTES:
            self._sum_in_chunks()
        else:
            for piece, places in self._round:
                _sum(places, out=piece)
        self._round.clear()
        self._filled = 0

    def _sum_in_chunks(self) -> None:
        """Sum one chunk of every piece here, and take the others from the ranks that have summed them.

        The same bits.
        """
        cut = [
            (piece.tensor_split(self._size), [place.tensor_split(self._size) for place in places])
            for piece, places in self._round
        ]
        for chunks, places in cut:
            _sum([place[self._rank] for place in places], out=chunks[self._rank])
            places[self._rank][self._rank].copy_(chunks[self._rank])
        self.memory.meet()
        for chunks, places in cut:
            for rank, chunk in enumerate(chunks):
                if rank != self._rank:
                    chunk.copy_(places[rank][rank])

    def _places(self, num_elements: int, dtype: torch.dtype) -> Sequence[Tensor]:
        key = self.memory.half, self._filled, num_elements, dtype
        if key not in self._known:
            end = self._filled + num_elements * dtype.itemsize
            self._known[key] = [slot[self._filled : end].view(dtype) for slot in self.memory.slots[self.memory.half]]
        return self._known[key]


class BackendReducer:
    """A small gradient goes whole to all ranks, which each sum it.

    Of a large one each rank gets, sums and sends a chunk.

    That is one message fewer than an all-reduce, or as many bytes. They travel while backward goes on.
    """

    def __init__(self, world: World) -> None:
        """Use the world's process group."""
        self._size = world.world_size
        self._whole: list[tuple[Tensor, Tensor, dist.Work]] = []
        self._chunked: list[tuple[Tensor, Tensor, Tensor, dist.Work]] = []

    def add(self, gradient: Tensor) -> None:
        """Send the gradient to all ranks, or chunk r of it to rank r."""
        length, size = gradient.numel(), self._size
        if (size - 2) * length * gradient.element_size() < GATHERED_BYTES:
            _scale(gradient, size, out=gradient)
            theirs = gradient.new_empty(size, length)
            gathering = dist.all_gather([as_bytes(row) for row in theirs], as_bytes(gradient), async_op=True)
            self._whole.append((gradient, theirs, gathering))
        else:
            mine = gradient.new_zeros(size, -(-length // size))
            _scale(gradient, size, out=mine.view(-1)[:length])
            theirs = torch.empty_like(mine)
            exchange = dist.all_to_all_single(as_bytes(theirs), as_bytes(mine), async_op=True)
            self._chunked.append((gradient, mine, theirs, exchange))

    def finish(self) -> None:
        """Sum what has come, and exchange the sums of chunks."""
        gathers = []
        for _, mine, theirs, exchange in self._chunked:
            exchange.wait()
            total = torch.empty_like(theirs[0])
            _sum(theirs.unbind(), out=total)
            gathers.append(dist.all_gather([as_bytes(row) for row in mine], as_bytes(total), async_op=True))
        for gradient, theirs, gathering in self._whole:
            gathering.wait()
            _sum(theirs.unbind(), out=gradient)
        for (gradient, mine, _, _), gathering in zip(self._chunked, gathers, strict=True):
            gathering.wait()
            gradient.copy_(mine.view(-1)[: gradient.numel()])
        self._whole.clear()
        self._chunked.clear()


def _scale(gradient: Tensor, world_size: int, out: Tensor) -> None:
    """Write a rank's share of the mean, as DDP does.

    Numbers of 16 bits are divided after the sum, to be rounded once.
    """
    if gradient.dtype in _HALVES:
        out.copy_(gradient)
    else:
        torch.div(gradient, world_size, out=out)


def _sum(parts: Sequence[Tensor], out: Tensor) -> None:
    """Add up the ranks' parts in the order of the ranks. Shapes: all alike."""
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
    """Return a view of a contiguous tensor: gloo moves any number as bytes, but knows few types."""
    return tensor.view(-1).view(torch.uint8)
