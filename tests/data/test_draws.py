"""Random numbers that a data set draws: each micro-batch of the global batch has its own, whichever rank cuts it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ddpexp.data.base import IndexData
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import TrainBatches

CPU = torch.device("cpu")


class Gathered(IndexData):
    """Whole batches: each sample with a number drawn for it."""

    def __len__(self) -> int:
        return 100

    def fetch(self, indices: Tensor, pinned: bool = False) -> tuple[Tensor, ...]:
        return indices, torch.rand(len(indices))


class Fetched(IndexData):
    """One sample at a time, through torch's DataLoader."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return index, float(torch.rand(()))


def drawn(data: Any, size: int, rank: int, seed: int = 0) -> list[dict[int, float]]:
    """Return what was drawn for each sample, by step."""
    steps = TrainBatches(data, plan_batches(24, 6, size), rank, seed, CPU).steps(0, 6)
    return [
        {int(i): float(x) for batch in micro_batches for i, x in zip(*batch, strict=True)} for micro_batches in steps
    ]


@pytest.mark.parametrize("data", [Gathered(), Fetched()], ids=["gathered", "fetched"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_sample_is_augmented_alike_at_every_world_size_and_unlike_on_every_rank(data: Any, size: int) -> None:
    alone = drawn(data, 1, 0)
    parts = [drawn(data, size, rank) for rank in range(size)]
    assert [{key: x for part in parts for key, x in part[step].items()} for step in range(6)] == alone
    values = [x for part in parts for step in part for x in step.values()]
    assert len(set(values)) == 6 * 24
    assert not set(values) & {x for step in drawn(data, 1, 0, seed=1) for x in step.values()}
