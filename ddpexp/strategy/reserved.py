"""The memory that data parallelism reserves for sums and for the workers of a host together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddpexp.strategy.comm.reduce import ALIGNED, SLOT_BYTES
from ddpexp.strategy.comm.shared_memory import size_of
from ddpexp.strategy.exact.exchange import Plan
from ddpexp.strategy.exact.tree import Block, push


def sums_bytes(tensors: Sequence[Tensor], num_leaves: int) -> int:
    """Return what the partial sums of trainer.reduction=exact take on rank zero; `num_leaves` is those of a rank."""
    return _leaf_bytes(tensors) * most_blocks(num_leaves)


def shared_bytes(tensors: Sequence[Tensor], num_leaves: int, world_size: int) -> int:
    """Return the size of the shared memory of a host's workers; `num_leaves` is 0 for trainer.reduction=fast."""
    if num_leaves:
        wanted = (_leaf_bytes(tensors) + ALIGNED) * max(Plan.of(num_leaves * world_size, world_size).num_blocks)
    else:
        wanted = sum(tensor.numel() * tensor.element_size() + ALIGNED for tensor in tensors)
    return size_of(world_size, min(wanted, SLOT_BYTES))


def most_blocks(num_leaves: int) -> int:
    """Return how many partial sums rank zero holds at once, the leaf that is being written among them."""
    stack: list[Block] = []
    most = 0
    for leaf in range(num_leaves):
        most = max(most, len(stack) + 1)
        push(stack, Block(0, leaf))
    return most


def _leaf_bytes(tensors: Sequence[Tensor]) -> int:
    itemsize = 8 if any(tensor.dtype == torch.float64 for tensor in tensors) else 4
    return sum(tensor.numel() * itemsize + ALIGNED for tensor in tensors)
