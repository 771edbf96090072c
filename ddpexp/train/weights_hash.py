"""The hash of a run's weights, of which ranks may hold different rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ddpexp.checkpoint.reader import weights_sha256
from ddpexp.distributed.world import World
from ddpexp.strategy.base import Shard, Strategy

_PART_BYTES = 16 << 20  # of a sharded tensor on rank zero at a time


def hash_weights(strategy: Strategy, world: World) -> str | None:
    """Return the hash of the weights on rank zero, None elsewhere. Ranks: all; communicates if tensors are sharded."""

    def parts(name: str, tensor: Tensor) -> Iterable[Tensor]:
        shard = strategy.shard(name, tensor)
        if shard.first_row is not None:
            return _gathered(shard, world)
        return (shard.tensor,) if world.is_rank_zero else ()

    digest = weights_sha256(strategy.modules, parts, lambda name, tensor: strategy.shard(name, tensor).shape)
    return digest if world.is_rank_zero else None


def _gathered(shard: Shard, world: World) -> Iterator[Tensor]:
    """Yield the whole tensor on rank zero, some rows at a time; nothing on the others. Ranks: all; communicates."""
    dtype, num_rows = shard.tensor.dtype, shard.shape[0]
    row_bytes = math.prod(shard.shape[1:]) * dtype.itemsize
    for begin in range(0, num_rows, step := max(1, _PART_BYTES // max(row_bytes, 1))):
        end = min(begin + step, num_rows)
        part = torch.zeros((end - begin, *shard.shape[1:]), dtype=dtype, device=world.device)
        if shard.replica == 0:
            _put(shard, part, begin)
        world.sum(part.view(-1).view(torch.uint8))  # exact: of each byte all summands but one are zero
        if world.is_rank_zero:
            yield part


def _put(shard: Shard, out: Tensor, begin: int) -> None:
    """Copy into `out`, the whole rows from `begin`, what this rank holds of them."""
    position, end = 0, begin + len(out)
    for rows in shard.blocks:
        low, high = max(begin, rows.start), min(end, rows.stop)
        if low < high:
            held = shard.tensor[position + low - rows.start : position + high - rows.start]
            into = out[low - begin : high - begin]
            if shard.columns is None:
                into.copy_(held)
            else:
                sizes = [len(columns) for columns in shard.columns]
                for columns, values in zip(shard.columns, torch.split(held, sizes, 1), strict=True):
                    into[:, columns.start : columns.stop] = values
        position += len(rows)
