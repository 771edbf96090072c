"""Exchange of the ranks' partial sums, which every rank adds up in the same tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ddpexp.distributed.world import World
from ddpexp.strategy.comm.reduce import ALIGNED, CHUNKED_BYTES, GATHERED_BYTES, as_bytes, common_memory
from ddpexp.strategy.comm.shared_memory import SharedMemory
from ddpexp.strategy.exact.tree import Node, add_up, blocks, order


@dataclass(frozen=True)
class Plan:
    """The number of blocks of each rank, and the tree over the blocks of all ranks in order."""

    num_blocks: Sequence[int]
    tree: Node

    @classmethod
    def of(cls, num_leaves: int, world_size: int) -> Plan:
        """Split the leaves into equal parts, one per rank."""
        share = num_leaves // world_size
        parts = [blocks(rank * share, (rank + 1) * share) for rank in range(world_size)]
        return cls([len(part) for part in parts], order([block for part in parts for block in part]))

    def sum(self, received: Sequence[Sequence[Tensor]], out: Tensor) -> None:
        """Add up `received[rank][block]` into `out`; ranks may have more slots than blocks."""
        add_up(
            self.tree,
            [slot for count, slots in zip(self.num_blocks, received, strict=True) for slot in slots[:count]],
            out,
        )


class Exchange(Protocol):
    """Sums the blocks of all ranks."""

    def sum(self, sent: Sequence[Tensor]) -> None:
        """Overwrite the first block with the sum over the blocks of all ranks. Ranks: all; communicates.

        Shapes: (num_elements,) each.
        """
        ...


def exchange_for(
    num_leaves: int, num_bytes: int, reduce_through: str, world: World, memory: SharedMemory | None = None
) -> Exchange:
    """Return the exchange for this world: through shared memory on one host, else through the backend.

    `memory` is what the ranks share already. Units: `num_bytes` is the size of one block.
    Ranks: all; communicates unless there is memory.

    Raises:
        RefusedError: `strategy.reduce_through=shared_memory`, but the workers cannot share memory.
    """
    plan = Plan.of(num_leaves, world.world_size)
    if world.world_size == 1:
        return Alone(plan)
    if world.device.type == "cpu" and memory is None:
        memory = common_memory((num_bytes + ALIGNED) * max(plan.num_blocks), reduce_through, world)
    return OverBackend(plan, world) if memory is None else OverMemory(plan, memory, world)


class Alone:
    """A single rank has all blocks."""

    def __init__(self, plan: Plan) -> None:
        """Add up in the order of `plan`."""
        self._plan = plan

    def sum(self, sent: Sequence[Tensor]) -> None:
        """Finish the tree."""
        self._plan.sum([sent], out=sent[0])


class OverMemory:
    """Every rank writes its blocks into its slot of the shared memory, and sums all slots after a barrier."""

    def __init__(self, plan: Plan, memory: SharedMemory, world: World) -> None:
        """Use the memory; blocks larger than a slot are summed in pieces."""
        self._plan = plan
        self.memory = memory
        self._rank = world.rank
        self._size = world.world_size
        self._block_bytes = memory.slot_bytes // max(plan.num_blocks) // ALIGNED * ALIGNED
        # Creating views takes longer than adding them up.
        self._cached: dict[tuple[int, int, torch.dtype], list[list[Tensor]]] = {}

    def sum(self, sent: Sequence[Tensor]) -> None:
        """Sum in pieces that fit into a slot."""
        most = self._block_bytes // sent[0].element_size()
        if sent[0].numel() <= most:
            self._sum(sent)
            return
        for pieces in zip(*(torch.split(block, most) for block in sent), strict=True):
            self._sum(pieces)

    def _sum(self, sent: Sequence[Tensor]) -> None:
        received = self._slot_views(sent[0].numel(), sent[0].dtype)
        for slot, block in zip(received[self._rank], sent, strict=False):
            slot.copy_(block)
        num_bytes = sent[0].numel() * sent[0].element_size()
        self.memory.end_round(num_bytes)
        if (self._size - 2) * num_bytes * max(self._plan.num_blocks) >= CHUNKED_BYTES:
            self._sum_in_chunks(received, sent[0])
        else:
            self._plan.sum(received, out=sent[0])

    def _sum_in_chunks(self, received: Sequence[Sequence[Tensor]], out: Tensor) -> None:
        """Sum one chunk on each rank, and copy the others from the ranks that summed them; the bits are the same."""
        chunked = [[slot.tensor_split(self._size) for slot in slots] for slots in received]
        chunks = out.tensor_split(self._size)
        self._plan.sum([[slot[self._rank] for slot in slots] for slots in chunked], out=chunks[self._rank])
        chunked[self._rank][0][self._rank].copy_(chunks[self._rank])  # other ranks read it only after the barrier
        self.memory.barrier()
        for rank, chunk in enumerate(chunks):
            if rank != self._rank:
                chunk.copy_(chunked[rank][0][rank])

    def _slot_views(self, num_elements: int, dtype: torch.dtype) -> list[list[Tensor]]:
        key = self.memory.half, num_elements, dtype
        if key not in self._cached:
            size, most = num_elements * dtype.itemsize, max(self._plan.num_blocks)
            starts = [number * self._block_bytes for number in range(most)]
            self._cached[key] = [
                [slot[start : start + size].view(dtype) for start in starts]
                for slot in self.memory.slots[self.memory.half]
            ]
        return self._cached[key]


class OverBackend:
    """Small blocks are gathered by all ranks, which each sum them; of large ones each rank sums one chunk."""

    def __init__(self, plan: Plan, world: World) -> None:
        """Use the world's process group."""
        self._plan, self._world = plan, world
        self._size = world.world_size
        self._most = max(plan.num_blocks)

    def sum(self, sent: Sequence[Tensor]) -> None:
        """Exchange the blocks, or chunks of them. A rank with fewer blocks than others sends padding."""
        out = sent[0]
        size = self._size
        most = self._most
        if (size - 2) * most * out.numel() * out.element_size() < GATHERED_BYTES:
            outgoing = out.new_zeros(most, out.numel())
            for slot, block in zip(outgoing, sent, strict=False):
                slot.copy_(block)
            received = out.new_empty(size, *outgoing.shape)
            self._world.all_gather([as_bytes(row) for row in received], as_bytes(outgoing))
            self._plan.sum([list(row) for row in received], out=out)
            return
        length = -(-out.numel() // size)
        parts = out.new_zeros(most, size, length)
        for slot, block in zip(parts, sent, strict=False):
            slot.view(-1)[: block.numel()] = block
        outgoing = parts.transpose(0, 1).contiguous()
        received = torch.empty_like(outgoing)
        self._world.all_to_all(as_bytes(received), as_bytes(outgoing))
        chunk = out.new_empty(length)
        self._plan.sum([list(row) for row in received], out=chunk)
        whole = out.new_empty(size, length)
        self._world.all_gather([as_bytes(row) for row in whole], as_bytes(chunk))
        out.copy_(whole.view(-1)[: out.numel()])
