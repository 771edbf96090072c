"""The ranks' blocks of a sum brought together, and added up in the one tree on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ddpexp.distributed.world import World
from ddpexp.strategy.comm.reduce import ALIGNED, CHUNKED_BYTES, GATHERED_BYTES, as_bytes, common_memory
from ddpexp.strategy.comm.shared_memory import SharedMemory
from ddpexp.strategy.exact.tree import Node, add_up, blocks, order
from ddpexp.strategy.options import Options


@dataclass(frozen=True)
class Plan:
    """Who brings what: the number of each rank's blocks, and the tree over the blocks of all ranks.

    One after the other.
    """

    num_blocks: Sequence[int]
    tree: Node

    @classmethod
    def of(cls, num_leaves: int, world_size: int) -> Plan:
        """Cut the leaves into equal parts, one a rank."""
        share = num_leaves // world_size
        parts = [blocks(rank * share, (rank + 1) * share) for rank in range(world_size)]
        return cls([len(part) for part in parts], order([block for part in parts for block in part]))

    def sum(self, theirs: Sequence[Sequence[Tensor]], out: Tensor) -> None:
        """Add up `theirs[rank][block]`, of which a rank may have more places than blocks, into `out`."""
        add_up(
            self.tree,
            [place for count, places in zip(self.num_blocks, theirs, strict=True) for place in places[:count]],
            out,
        )


class Exchange(Protocol):
    """What brings the blocks of all ranks together."""

    def sum(self, mine: Sequence[Tensor]) -> None:
        """Write the sum over all ranks' blocks over the first of `mine`. Ranks: all; communicates. Shapes.

        (elements,).
        """
        ...


def exchange_for(num_leaves: int, num_bytes: int, options: Options, world: World) -> Exchange:
    """Choose the way: none alone, memory on one host, else the backend; `num_bytes` are those of one block.

    Ranks: all; communicates.

    Raises:
        RefusedError: `strategy.reduce_through=shared_memory` where the workers cannot share memory.
    """
    plan = Plan.of(num_leaves, world.world_size)
    if world.world_size == 1:
        return Alone(plan)
    memory = None
    if world.device.type == "cpu":
        memory = common_memory((num_bytes + ALIGNED) * max(plan.num_blocks), options, world)
    return OverBackend(plan, world) if memory is None else OverMemory(plan, memory, world)


class Alone:
    """One rank has all blocks."""

    def __init__(self, plan: Plan) -> None:
        """Add up as `plan` says."""
        self._plan = plan

    def sum(self, mine: Sequence[Tensor]) -> None:
        """Finish the tree."""
        self._plan.sum([mine], out=mine[0])


class OverMemory:
    """Every rank writes its blocks into its slot, piece by piece, and sums all slots when all have written."""

    def __init__(self, plan: Plan, memory: SharedMemory, world: World) -> None:
        """Use the memory; its slots may be smaller than the blocks."""
        self._plan = plan
        self.memory = memory
        self._rank = world.rank
        self._size = world.world_size
        self._place_bytes = memory.slot_bytes // max(plan.num_blocks) // ALIGNED * ALIGNED
        self._known: dict[
            tuple[int, int, torch.dtype], list[list[Tensor]]
        ] = {}  # making views takes longer than adding

    def sum(self, mine: Sequence[Tensor]) -> None:
        """Sum as many elements at once as there is room for."""
        most = self._place_bytes // mine[0].element_size()
        if mine[0].numel() <= most:
            self._sum(mine)
            return
        for pieces in zip(*(torch.split(block, most) for block in mine), strict=True):
            self._sum(pieces)

    def _sum(self, mine: Sequence[Tensor]) -> None:
        theirs = self._places(mine[0].numel(), mine[0].dtype)
        for place, block in zip(theirs[self._rank], mine, strict=False):
            place.copy_(block)
        num_bytes = mine[0].numel() * mine[0].element_size()
        self.memory.end_round(num_bytes)
        if (self._size - 2) * num_bytes * max(self._plan.num_blocks) >= CHUNKED_BYTES:
            self._sum_in_chunks(theirs, mine[0])
        else:
            self._plan.sum(theirs, out=mine[0])

    def _sum_in_chunks(self, theirs: Sequence[Sequence[Tensor]], out: Tensor) -> None:
        """Sum one chunk here, and take the others from the ranks that have summed them: the same bits."""
        cut = [[place.tensor_split(self._size) for place in places] for places in theirs]
        chunks = out.tensor_split(self._size)
        self._plan.sum([[place[self._rank] for place in places] for places in cut], out=chunks[self._rank])
        cut[self._rank][0][self._rank].copy_(chunks[self._rank])  # which no other rank reads before the meeting
        self.memory.meet()
        for rank, chunk in enumerate(chunks):
            if rank != self._rank:
                chunk.copy_(cut[rank][0][rank])

    def _places(self, num_elements: int, dtype: torch.dtype) -> list[list[Tensor]]:
        key = self.memory.half, num_elements, dtype
        if key not in self._known:
            size, most = num_elements * dtype.itemsize, max(self._plan.num_blocks)
            starts = [number * self._place_bytes for number in range(most)]
            self._known[key] = [
                [slot[start : start + size].view(dtype) for start in starts]
                for slot in self.memory.slots[self.memory.half]
            ]
        return self._known[key]


class OverBackend:
    """Small blocks go whole to all ranks, which each sum them; of large ones each rank gets, sums and sends a chunk."""

    def __init__(self, plan: Plan, world: World) -> None:
        """Use the world's process group."""
        self._plan = plan
        self._size = world.world_size
        self._most = max(plan.num_blocks)

    def sum(self, mine: Sequence[Tensor]) -> None:
        """Exchange the blocks, or chunks of them. A rank with fewer blocks than others sends what nobody reads."""
        out, size, most = mine[0], self._size, self._most
        if (size - 2) * most * out.numel() * out.element_size() < GATHERED_BYTES:
            own = out.new_zeros(most, out.numel())
            for place, block in zip(own, mine, strict=False):
                place.copy_(block)
            theirs = out.new_empty(size, *own.shape)
            dist.all_gather([as_bytes(row) for row in theirs], as_bytes(own))
            self._plan.sum([list(row) for row in theirs], out=out)
            return
        length = -(-out.numel() // size)
        parts = out.new_zeros(most, size, length)
        for place, block in zip(parts, mine, strict=False):
            place.view(-1)[: block.numel()] = block
        own = parts.transpose(0, 1).contiguous()
        theirs = torch.empty_like(own)
        dist.all_to_all_single(as_bytes(theirs), as_bytes(own))
        chunk = out.new_empty(length)
        self._plan.sum([list(row) for row in theirs], out=chunk)
        whole = out.new_empty(size, length)
        dist.all_gather([as_bytes(row) for row in whole], as_bytes(chunk))
        out.copy_(whole.view(-1)[: out.numel()])
