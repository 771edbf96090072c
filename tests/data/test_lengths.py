"""Batches of samples of similar length: who is in them, and how little of them is padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import TrainBatches
from ddpexp.data.datasets import Arrays
from ddpexp.data.lengths import ByLength, padding
from ddpexp.data.weights import Weighted, checked_amounts
from tests.orders import Shuffled
from tests.refusals import refused

LENGTHS = np.random.default_rng(0).lognormal(4, 0.6, 10_007).round()  # as those of sentences: 55, and up to 500


def visited(order: Any, epoch: int = 0) -> np.ndarray:
    found: np.ndarray = order.order(0, epoch)(np.arange(order.samples_per_epoch))
    return found


@pytest.mark.parametrize("base", [Shuffled(10_007), Weighted.of(np.arange(10_007.0), 5000)])
def test_an_epoch_visits_the_samples_of_the_other_order(base: Any) -> None:
    order = ByLength(base, LENGTHS, 32)
    assert np.array_equal(np.sort(visited(order)), np.sort(visited(base)))
    assert not np.array_equal(visited(order), visited(order, 1))
    trained = base.samples_per_epoch // 32 * 32  # what is left over is not the longest or shortest samples
    assert np.array_equal(visited(order)[trained:], visited(base)[trained:])


@pytest.mark.parametrize("size", [8, 32])
def test_less_than_a_twentieth_of_a_batch_is_padding(size: int) -> None:
    order = ByLength(Shuffled(10_007), LENGTHS, size)
    assert padding(LENGTHS[visited(order)], size) < 0.05
    assert padding(LENGTHS[visited(Shuffled(10_007))], size) > 0.4
    assert padding(np.array([3, 1, 2, 2, 9]), 2) == 1 - 8 / 10


def test_lengths_do_not_rise_within_an_epoch() -> None:
    order = ByLength(Shuffled(10_007), LENGTHS, 32)
    means = LENGTHS[visited(order)][: 10_007 // 32 * 32].reshape(-1, 32).mean(1)
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2


def test_any_place_is_found_directly_and_the_same_at_every_number_of_workers() -> None:
    order = ByLength(Shuffled(10_007), LENGTHS, 32)
    parts = {}
    for workers in (1, 2, 4):
        ranks = [
            TrainBatches(Arrays((torch.arange(10_007),)), plan_batches(32, 4, workers), rank, 0, torch.device("cpu"),
            order=order)
            for rank in range(workers)
        ]  # fmt: skip
        of_ranks = [np.stack(list(batches.indices(0, 700))) for batches in ranks]
        parts[workers] = np.concatenate(of_ranks, axis=1)
        later = np.stack(list(ranks[-1].indices(333, 340)))
        assert np.array_equal(later, of_ranks[-1][333:340])
    assert np.array_equal(parts[1], parts[2])
    assert np.array_equal(parts[1], parts[4])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a"], "data.lengths=x: something"),
        ([1, 2], "data.lengths=x: training"),
        ([1, -2, 3], "data.lengths=x: length"),
        ([1, 2, np.nan], "data.lengths=x: nan"),
    ],
)
def test_what_is_no_length_is_refused(values: list[Any], message: str) -> None:
    with refused(message):
        checked_amounts(values, 3, "length", "data.lengths=x")
