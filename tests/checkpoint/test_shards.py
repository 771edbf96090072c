"""Files of tensors of which ranks hold different rows: every byte is written once, at every number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from safetensors.torch import load

from ddpexp.checkpoint.layout import copy_span, lay_out, share
from ddpexp.errors import DdpexpError
from ddpexp.strategy.base import Shard

TENSORS = {
    "whole": torch.arange(700_000, dtype=torch.float32),
    "rows": torch.arange(600_000, dtype=torch.float64).view(-1, 100),
    "few": torch.arange(6, dtype=torch.int64).view(2, 3),  # fewer rows than ranks
    "half": torch.arange(1000, dtype=torch.float16).view(-1, 10),
    "scalar": torch.tensor(3.0),
}
SHARDED = ("rows", "few", "half")


def held(rank: int, num_shards: int, replica: int) -> dict[str, Shard]:
    """Return what a rank holds: rows as `torch.chunk` cuts them, or all."""
    shards = {}
    for name, tensor in TENSORS.items():
        if name not in SHARDED:
            shards[name] = Shard.whole(tensor)
            continue
        size = -(-len(tensor) // num_shards)
        first = min(rank * size, len(tensor))
        shards[name] = Shard(tensor[first : first + size], tuple(tensor.shape), first, replica)
    return shards


def written(held_by_rank: Sequence[Mapping[str, Shard]]) -> bytes:
    """Return the file that the ranks write together; a byte that is written twice, or by nobody, fails."""
    content, times = None, None
    for rank, shards in enumerate(held_by_rank):
        file = lay_out("model", shards)
        if content is None or times is None:
            content, times = torch.zeros(file.num_bytes, dtype=torch.uint8), torch.zeros(file.num_bytes)
        for span in share([file], rank, len(held_by_rank)):
            part = slice(span.offset, span.offset + span.num_bytes)
            copy_span(file, shards, span, content[part])
            times[part] += 1
    assert content is not None
    assert times is not None
    assert times.eq(1).all()
    return content.numpy().tobytes()


@pytest.mark.parametrize(("num_shards", "num_replicas"), [(1, 1), (2, 1), (3, 1), (5, 1), (2, 2), (1, 3)])
def test_the_ranks_write_the_file_of_one(num_shards: int, num_replicas: int) -> None:
    alone = written([{name: Shard.whole(tensor) for name, tensor in TENSORS.items()}])
    ranks = [held(rank, num_shards, replica) for replica in range(num_replicas) for rank in range(num_shards)]
    assert written(ranks) == alone
    assert written([{name: Shard.whole(tensor) for name, tensor in TENSORS.items()}] * 3) == alone
    read = load(alone)
    assert all(read[name].equal(tensor) for name, tensor in TENSORS.items())


def test_a_type_that_the_format_lacks_is_named() -> None:
    with pytest.raises(DdpexpError, match=r"rows is of torch\.complex128"):
        lay_out("model", {"rows": Shard(torch.zeros(2, 2, dtype=torch.complex128), (4, 2), 0)})
