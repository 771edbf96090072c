"""Which part of a parameter each rank of a tensor group holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddpexp.strategy.base import Shard


@dataclass(frozen=True)
class Cut:
    """How a parameter is divided among ranks: along one dimension, which may consist of several parts.

    A layer that computes queries, keys and values at once has three parts, and every rank a share of each.
    """

    shape: tuple[int, ...]  # of the whole parameter
    dim: int  # 0 or 1
    parts: tuple[int, ...]  # lengths, whose sum is that of the dimension
    size: int  # number of ranks

    def ranges(self, rank: int) -> tuple[range, ...]:
        """Return where the share of a rank lies along the dimension."""
        ranges, begin = [], 0
        for length in self.parts:
            share = length // self.size
            ranges.append(range(begin + rank * share, begin + (rank + 1) * share))
            begin += length
        return tuple(ranges)

    def cut(self, tensor: Tensor, rank: int) -> Tensor:
        """Return the share of a rank in new memory. Shapes: `self.shape` -> the same but for the dimension."""
        pieces = [tensor.narrow(self.dim, part.start, len(part)) for part in self.ranges(rank)]
        return torch.cat(pieces, self.dim)


@dataclass(frozen=True)
class Share:
    """What one rank of a tensor group has of a parameter."""

    cut: Cut
    rank: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its shape."""
        length = sum(self.cut.parts) // self.cut.size
        return tuple(length if dim == self.cut.dim else size for dim, size in enumerate(self.cut.shape))

    def take(self, whole: Tensor) -> Tensor:
        """Return it in new memory."""
        return self.cut.cut(whole, self.rank)

    def shard(self, local: Tensor, first: int, replica: int) -> Shard:
        """Return as a part of the whole parameter what this rank holds: `local`, the rows from `first` of the share."""
        ranges = self.cut.ranges(self.rank)
        if self.cut.dim == 1:
            rows: tuple[range, ...] = (range(first, first + len(local)),)
            return Shard(local, self.cut.shape, first, replica, rows, ranges)
        rows = _places(ranges, first, len(local)) or (range(0),)
        return Shard(local, self.cut.shape, rows[0].start, replica, rows)


def _places(ranges: tuple[range, ...], first: int, length: int) -> tuple[range, ...]:
    """Return where `length` rows of a share, from the row `first` of it, lie in the whole."""
    found: list[range] = []
    position = 0
    for rows in ranges:
        low, high = max(first, position), min(first + length, position + len(rows))
        if low < high:
            begin, end = rows.start + low - position, rows.start + high - position
            if found and found[-1].stop == begin:
                begin = found.pop().start
            found.append(range(begin, end))
        position += len(rows)
    return tuple(found)
