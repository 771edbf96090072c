"""One rank's share of the samples: the same steps at every world size, from anywhere, through any kind of data set."""

from __future__ import annotations

import os
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpexp.data.base import IndexData
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import EvalBatches, TrainBatches, units_per_sample
from ddpexp.data.datasets import Arrays
from ddpexp.data.order import Order, Permutation
from ddpexp.distributed.transfers import to_device
from ddpexp.errors import RefusedError
from tests.orders import Shuffled, hold_out
from tests.refusals import is_about, refused

CPU = torch.device("cpu")


class Items(IndexData):
    """Item by item: the index, the process that fetched it, and a random number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int, float]:
        return torch.tensor(index), os.getpid(), float(torch.rand(()))


def indexed(count: int) -> Arrays:
    return Arrays((torch.arange(count),))


def train(
    data: Any, size: int = 1, rank: int = 0, micro: Any = "auto", total: int = 24, num_workers: int = 0
) -> TrainBatches:
    return TrainBatches(data, plan_batches(total, micro, size), rank, 0, CPU, num_workers)


def ids(steps: Any) -> list[list[list[int]]]:
    """Return the indices of each step's micro-batches."""
    return [[batch[0].tolist() for batch in micro_batches] for micro_batches in steps]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("micro", ["auto", 3, 1])
@pytest.mark.parametrize("kind", [indexed, Items])
def test_the_ranks_share_of_a_step_is_the_same_global_batch_at_every_world_size(
    size: int, micro: Any, kind: Callable[[int], Any]
) -> None:
    parts = [ids(train(kind(100), size, rank, micro).steps(0, 6)) for rank in range(size)]
    together = [[index for rank in range(size) for batch in parts[rank][step] for index in batch] for step in range(6)]
    # Four steps an epoch: the last four of a hundred samples are dropped, others in each epoch.
    expected = [
        Permutation(100, 0, step // 4)(np.arange(step % 4 * 24, step % 4 * 24 + 24)).tolist() for step in range(6)
    ]
    assert together == expected


@pytest.mark.parametrize("kind", [indexed, Items])
@pytest.mark.parametrize("begin", [1, 3, 4, 5, 9])
def test_steps_from_anywhere_are_the_same_as_from_the_start(kind: Callable[[int], Any], begin: int) -> None:
    batches = train(kind(100), size=2, rank=1, micro=3)
    assert ids(batches.steps(begin, 12)) == ids(batches.steps(0, 12))[begin:]


def test_steps_of_many_blocks_are_in_the_order_of_the_epochs() -> None:
    held = train(indexed(20_000), size=2, rank=1, total=8)
    found = [index for step in held.indices(100, 15_100) for index in step.tolist()]
    steps = np.arange(100, 15_100)
    positions = steps[:, None] % 2500 * 8 + np.arange(4, 8)
    expected = [Permutation(20_000, 0, epoch)(positions[steps // 2500 == epoch]).ravel() for epoch in range(7)]
    assert found == np.concatenate(expected).tolist()


def test_a_start_in_the_middle_of_an_endless_epoch_costs_no_more_than_one_at_its_beginning() -> None:
    class Endless(IndexData):
        def __len__(self) -> int:
            return 10**9

        def fetch(self, indices: Tensor, pinned: bool = False) -> tuple[Tensor]:
            return (indices,)

    batches = train(Endless())
    [[far]] = ids(batches.steps(10**6, 10**6 + 1))  # an hour if the way were walked
    assert far == Permutation(10**9, 0, 0)(np.arange(24 * 10**6, 24 * 10**6 + 24)).tolist()


def test_the_first_batch_after_a_start_computes_few_indices_and_later_ones_more() -> None:
    counts: list[int] = []

    class Counting:
        samples_per_epoch = 10**9

        def order(self, seed: int, epoch: int) -> Order:
            def counted(positions: NDArray[np.int64]) -> NDArray[np.int64]:
                counts.append(positions.size)
                return positions

            return counted

    steps = replace(train(indexed(100), total=8), order=Counting()).indices(10**8, 2 * 10**8)
    next(steps)
    assert counts == [512]  # so that a run resumes in less than a millisecond
    for _ in range(20_000):
        next(steps)
    assert counts == [512, 2048, 8192, *[32768] * 5]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_numbers_of_a_data_set_do_not_depend_on_who_draws_them(num_workers: int) -> None:
    def drawn(begin: int, workers: int) -> list[list[list[float]]]:
        steps = train(Items(100), micro=6, num_workers=workers).steps(begin, 6)
        return [[batch[2].tolist() for batch in micro_batches] for micro_batches in steps]

    torch.rand(3)
    expected = drawn(0, 0)
    torch.rand(5)
    assert drawn(0, num_workers) == expected
    assert drawn(4, num_workers) == expected[4:]
    assert len({number for step in expected for batch in step for number in batch}) > 140


class Draws(IndexData):
    """Gathers random numbers of torch."""

    def __len__(self) -> int:
        return 100

    def fetch(self, indices: Tensor, pinned: bool = False) -> tuple[Tensor, ...]:
        return (torch.rand(len(indices)),)


@pytest.mark.parametrize("data", [Draws(), hold_out(Draws(), 0.1)[0]], ids=["whole", "part"])
def test_random_numbers_of_a_gather_do_not_depend_on_what_was_drawn_before(data: Any) -> None:
    expected = ids(train(data, micro=6).steps(0, 9))
    torch.rand(5)
    assert ids(train(data, micro=6).steps(5, 9)) == expected[5:]


def test_loader_workers_live_across_epochs() -> None:
    steps = list(train(Items(96), micro=6, num_workers=2).steps(0, 12))
    pids = [{int(pid) for batch in micro_batches for pid in batch[1]} for micro_batches in steps]
    assert all(found == pids[0] and len(found) == 2 and os.getpid() not in found for found in pids)


def test_more_batch_than_samples_is_refused() -> None:
    with pytest.raises(RefusedError) as caught:
        train(indexed(23))
    assert is_about(caught.value, "trainer.global_batch_size=24")


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 3, 8, 33])
@pytest.mark.parametrize("kind", [indexed, Items])
def test_the_ranks_evaluate_each_sample_once_and_in_order(size: int, count: int, kind: Callable[[int], Any]) -> None:
    parts = [[batch[0].tolist() for batch in EvalBatches(kind(count), 4, rank, size, CPU)] for rank in range(size)]
    rounds = [part[turn] for turn in range(max(map(len, parts))) for part in parts if turn < len(part)]
    assert [index for batch in rounds for index in batch] == list(range(count))


def test_an_evaluation_is_fetched_by_the_configured_workers_and_its_first_batch_here() -> None:
    here = EvalBatches(Items(10), 4, 0, 1, CPU)
    workers = EvalBatches(Items(10), 4, 0, 1, CPU, num_workers=1)
    found = [{int(pid) for batch in batches for pid in batch[1]} for batches in (here, workers, [workers.first()])]
    assert found[0] == found[2] == {os.getpid()}
    assert os.getpid() not in found[1]


def test_the_first_batch_of_an_evaluation_is_the_same_on_every_rank() -> None:
    for rank in range(4):
        assert EvalBatches(indexed(10), 4, rank, 4, CPU).first()[0].tolist() == [0, 1, 2, 3]


def test_every_tensor_of_a_nest_is_moved() -> None:
    pair = namedtuple("pair", ["left", "right"])
    nest = {"a": [torch.ones(1), (torch.zeros(2), "word")], "b": pair(torch.ones(3), 4)}
    moved = to_device(nest, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert moved["a"][1][1] == "word"
    assert isinstance(moved["b"], pair)
    assert moved["b"].left.is_meta
    assert moved["b"].right == 4


class Doubled(Items):
    """Visits a third of its samples twice an epoch, in an order of its own."""

    samples_per_epoch = 66

    def order(self, seed: int, epoch: int) -> Order:
        return lambda positions: (positions // 2 + epoch) % 33


def test_a_data_set_with_an_order_of_its_own_is_trained_in_it() -> None:
    data = Doubled(100)
    assert train(data).steps_per_epoch == 2
    for step in (0, 1, 2):
        expected = data.order(0, step // 2)(np.arange(step % 2 * 24, step % 2 * 24 + 24)).tolist()
        parts = [ids(train(data, 2, rank).steps(step, step + 1))[0][0] for rank in range(2)]
        assert parts[0] + parts[1] == expected
    with refused("trainer.global_batch_size=72"):
        train(data, total=72)


def test_an_order_that_is_passed_counts_before_that_of_the_data() -> None:
    batches = TrainBatches(Doubled(100), plan_batches(24, "auto", 1), 0, 0, CPU, order=Shuffled(48))
    assert batches.samples_per_epoch == 48
    assert next(batches.indices(0, 1)).tolist() == Permutation(48, 0, 0)(np.arange(24)).tolist()


def test_of_sequences_of_one_length_the_tokens_per_second_are_recorded() -> None:
    class Sequences:
        tokens_per_sample = 64

    assert units_per_sample(Sequences()) == {"samples": 1, "tokens": 64}
    assert units_per_sample([1, 2]) == {"samples": 1}
