"""Batches of as many tokens as fit: each sample once, little padding, and the same ones for every number of workers."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from ddpexp.data.adapters import MapStyle
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import TrainBatches
from ddpexp.data.datasets import Splits
from ddpexp.data.fingerprint import differences, fingerprint
from ddpexp.data.token_batches import ByTokens, by_tokens
from ddpexp.data.transforms import Transformed
from tests.refusals import refused

DRAW = np.random.default_rng(0)
SENTENCES = DRAW.lognormal(4, 0.6, 10_007).round().clip(1, 4096)  # 55 tokens, and up to 500
EVEN = DRAW.integers(1, 101, 10_007).astype(np.float64)
CPU = torch.device("cpu")


class Sequences(Dataset[Any]):
    def __init__(self, lengths: Any) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, int(self.lengths[index])


def joined(parts: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(parts))


def batches(order: ByTokens, epoch: int = 0, seed: int = 0) -> list[list[int]]:
    numbers = order.order(seed, epoch)(np.arange(order.samples_per_epoch))
    return [batch.tolist() for batch in order.members(seed, epoch, numbers)]


def train(order: ByTokens, size: int = 1, rank: int = 0, workers: int = 0) -> TrainBatches:
    data = Transformed(MapStyle(Sequences(order.lengths)))
    return TrainBatches(data, plan_batches(8, 1, size), rank, 0, CPU, workers, order=order)


@pytest.mark.parametrize(("lengths", "most"), [(SENTENCES, 4096), (SENTENCES, 1024), (EVEN, 1000), (EVEN[:300], 1000)])
def test_an_epoch_visits_each_sample_once_in_batches_that_are_nearly_full(lengths: Any, most: int) -> None:
    order = by_tokens(lengths, most)
    first = batches(order)
    assert sorted(joined(first)) == list(range(len(lengths)))
    tokens = np.array([lengths[batch].max() * len(batch) for batch in first])
    assert tokens.max() <= most
    assert tokens.mean() > 0.9 * most
    few = len(lengths) < 1000
    assert 1 - lengths.sum() / tokens.sum() == pytest.approx(order.padding)
    assert order.padding < (0.15 if few else 0.05)
    numbers = order.order(0, 0)(np.arange(order.samples_per_epoch))
    assert order.sizes(numbers).tolist() == [len(batch) for batch in first]
    assert order.mean_size == pytest.approx(np.mean([len(batch) for batch in first]))
    largest = order.largest
    assert lengths[largest].max() * len(largest) == tokens.max()


def test_who_is_together_and_when_differs_from_epoch_to_epoch_and_follows_from_the_seed() -> None:
    order = by_tokens(SENTENCES, 4096)
    first, second = batches(order), batches(order, epoch=1)
    together = {frozenset(batch) for batch in first}
    assert sum(frozenset(batch) in together for batch in second) < 0.05 * len(second)
    assert batches(by_tokens(SENTENCES, 4096), epoch=1) == second
    assert batches(order, seed=1) != first
    means = [SENTENCES[batch].mean() for batch in first]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.3  # lengths do not rise within an epoch


def test_every_number_of_workers_has_the_same_micro_batches_from_any_step() -> None:
    order = by_tokens(SENTENCES, 1024)

    def steps(size: int, rank: int, first: int, stop: int, workers: int = 0) -> list[list[list[int]]]:
        found = train(order, size, rank, workers).steps(first, stop)
        return [[batch[0].tolist() for batch in micro_batches] for micro_batches in found]

    whole = steps(1, 0, 0, 100)  # more than one epoch
    assert all(len(step) == 8 for step in whole)
    for size, workers in ((2, 1), (4, 0)):
        ranks = [steps(size, rank, 70, 90, workers) for rank in range(size)]
        assert [joined(parts) for parts in zip(*ranks, strict=True)] == whole[70:90]
    found = train(order)
    assert found.num_samples(100) == sum(len(batch) for step in whole for batch in step)
    assert [list(row) for row in found.indices(70, 72)] == [joined(step) for step in whole[70:72]]
    index = whole[70][3][1]
    assert f"sample {index} of 10,007 in `train`" == found.describe(70, 3, [1])


@pytest.mark.parametrize("most", [1024, 1040])  # an epoch leaves batches out, or none
def test_the_samples_of_many_epochs_are_counted_without_a_list_of_them(most: int) -> None:
    found = train(by_tokens(EVEN, most))
    order = found.order
    assert isinstance(order, ByTokens)
    steps = 2000 * found.steps_per_epoch + 5
    lengths = [found.steps_per_epoch] * 2000 + [5]
    expected = sum(
        int(order.sizes(order.order(0, epoch)(np.arange(8 * length))).sum()) for epoch, length in enumerate(lengths)
    )
    tracemalloc.start()
    try:
        assert found.num_samples(steps) == expected
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_padding_is_not_counted_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    order = by_tokens(SENTENCES, 1024)
    padding = order.padding
    monkeypatch.delattr(ByTokens, "members")
    assert order.padding == padding


def test_a_place_late_in_a_long_epoch_is_found_without_those_before() -> None:
    order = by_tokens(DRAW.lognormal(4, 0.6, 1_000_000).round().clip(1, 8192), 8192)
    seconds = []
    for epoch in range(3):
        begin = time.perf_counter()
        numbers = order.order(0, epoch)(np.arange(order.samples_per_epoch - 8, order.samples_per_epoch))
        assert len(order.members(0, epoch, numbers)) == 8
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.1


def test_other_lengths_and_other_sizes_are_other_data() -> None:
    splits = Splits(MapStyle(Sequences(EVEN)), {})
    now, more, other = (
        fingerprint(splits, True, 0, by_tokens(lengths, most))
        for lengths, most in ((EVEN, 1000), (EVEN, 1200), (np.sort(EVEN), 1000))
    )
    assert differences(now, now) == []
    assert "an epoch of `train` had" in differences(now, more)[0]
    assert now["train"]["lengths"] != other["train"]["lengths"]


def test_what_does_not_fit_is_refused() -> None:
    with refused("data.batch_tokens=90"):
        by_tokens(EVEN, 90)
    with refused("trainer.global_batch_size=8"):
        train(by_tokens(np.ones(20), 10))
