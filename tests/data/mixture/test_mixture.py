"""Mixtures: shares that are right in any long stretch, each source by its own order, and weights that do not fit."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from ddpexp.data.adapters import adapted
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import TrainBatches
from ddpexp.data.datasets import Arrays, Splits
from ddpexp.data.mixture.dataset import mix
from ddpexp.data.mixture.order import MixtureOrder, _cycle
from ddpexp.data.mixture.weights import quotas, stages
from ddpexp.errors import DdpexpError
from tests.conftest import Ddpexp
from tests.orders import Shuffled, hold_out
from tests.points import Recipe
from tests.refusals import refused
from tests.test_interruptions import kill_everything, same

CPU = torch.device("cpu")


def order(weights: Any, lengths: Any, epoch_samples: int = 100_000) -> MixtureOrder:
    return MixtureOrder([Shuffled(length) for length in lengths], lengths, weights, epoch_samples)


def sources_of(indices: Any, lengths: Any) -> Any:
    return np.searchsorted(np.cumsum(lengths), indices, side="right")


@pytest.mark.parametrize("weights", [(0.7, 0.3), (0.5, 0.5), (1, 2, 4), (0.9, 0.0, 0.1), (3, 0.01, 1, 1, 0.5), (1.0,)])
@pytest.mark.parametrize("seed", [0, 5])
def test_shares_are_right_in_any_stretch(weights: tuple[float, ...], seed: int) -> None:
    lengths = [1000 + 17 * number for number in range(len(weights))]
    found = sources_of(order([(0, weights)], lengths).order(seed, 0)(np.arange(100_000)), lengths)
    for source, weight in enumerate(weights):
        off = np.concatenate([[0], np.cumsum((found == source) - weight / sum(weights))])
        assert off.max() - off.min() < 2 * len(weights) + 0.005 * 10_000 * weight  # of any stretch at all
    assert len(np.unique(np.diff(np.flatnonzero(found == 0)))) > 1 or len(weights) == 1  # in no fixed rhythm


def test_each_source_is_visited_by_its_own_epochs_whatever_the_epochs_of_the_mixture() -> None:
    mixture = order([(0, (0.5, 0.5))], [50, 1000], 700)
    indices = np.concatenate([mixture.order(3, epoch)(np.arange(700)) for epoch in range(20)])
    first, second = indices[indices < 50], indices[indices >= 50] - 50
    assert abs(len(first) - len(second)) < 4
    for visits, length in ((first, 50), (second, 1000)):
        epochs = [visits[start : start + length].tolist() for start in range(0, len(visits) - length + 1, length)]
        assert len(epochs) > 5
        assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_a_position_is_found_by_itself_and_seeds_differ() -> None:
    mixture = order([(0, (0.6, 0.4)), (30_000, (0.1, 0.9))], [999, 777])
    whole = mixture.order(1, 0)(np.arange(60_000))
    places = np.array([[0, 59_999], [29_999, 30_000]])
    assert np.array_equal(mixture.order(1, 0)(places), whole[places])
    assert not np.array_equal(mixture.order(2, 0)(np.arange(100)), whole[:100])
    found = sources_of(whole, [999, 777])
    assert abs((found[:30_000] == 0).mean() - 0.6) < 0.001
    assert abs((found[30_000:] == 0).mean() - 0.1) < 0.001
    second = whole[found == 1]
    assert sorted(second[777 * 20 : 777 * 21]) == list(range(999, 999 + 777))  # across the step of the schedule


def test_a_position_in_a_billion_samples_takes_milliseconds() -> None:
    mixture = order([(0, (0.7, 0.3)), (10**8, (0.4, 0.6))], [600_000_000, 400_000_000], 10**9)
    seconds = []
    for number in range(5):
        _cycle.cache_clear()
        begin = time.perf_counter()
        indices = mixture.order(number, 0)(np.arange(8 * 10**8, 8 * 10**8 + 64))
        seconds.append(time.perf_counter() - begin)
        assert len(set(indices.tolist())) == 64
    assert min(seconds) < 0.1  # the figure, below 5 ms, is of benchmarks: here is only that nothing is walked through


def test_steps_may_be_texts_as_json_has_them() -> None:
    one, other = {"a": 1, "b": 2}, {"a": 3, "b": 4}
    assert stages({"100": other, "0": one}, ["a", "b"]) == stages({0: one, 100: other}, ["a", "b"])
    assert [stage.step for stage in stages({"100": other, "0": one}, ["a", "b"])] == [0, 100]


def test_a_cycle_has_every_source_that_has_a_weight() -> None:
    assert quotas((7, 3)) == [7000, 3000]
    assert quotas((1, 0, 1)) == [5000, 0, 5000]
    assert sum(quotas((1, 1, 1))) == 10_000
    assert quotas((1e6, 1))[1] >= 1
    assert min(quotas((0.001, 0.999))) == 200


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1}, "data.source_weights: weight"),
        (
            {"a": 1, "b": 1, "bb": 2},
            "data.source_weights.bb: Did you mean b?",
        ),
        ({"a": 1, "b": -1}, "data.source_weights.b=-1"),
        ({"a": 1, "b": True}, "data.source_weights.b=true"),
        ({"a": 0, "b": 0}, "data.source_weights: weights are 0"),
        ({"a": 1, "b": 1e-9}, "data.source_weights.b=1e-09"),
        ({10: {"a": 1, "b": 1}}, "data.source_weights: step 10"),
        ({"x": {"a": 1, "b": 1}}, "data.source_weights: 'x'"),
        ({0: {"a": 1, "b": 1}, 5: {"a": 1}}, "data.source_weights.5"),
        ([1, 2], "data.source_weights=[1, 2]"),
    ],
)
def test_weights_that_do_not_fit_the_sources_are_refused(weights: Any, message: str) -> None:
    with refused(message):
        stages(weights, ["a", "b"])


def points(count: int, first: int) -> Arrays:
    return Arrays((torch.arange(first, first + count), torch.arange(first, first + count).float()[:, None]))


def items(count: int, first: int) -> TensorDataset:
    return TensorDataset(*points(count, first).tensors)


@pytest.mark.parametrize("kinds", [(points, points), (points, items), (items, items)])
def test_every_number_of_workers_has_the_same_batches(kinds: Any) -> None:
    parts = {
        "a": Splits(adapted(kinds[0](100, 0)), {"eval": [1]}),
        "b": Splits(adapted(kinds[1](40, 1000)), {"eval": [2], "test": [3]}),
    }
    splits = mix(parts, {0: {"a": 1, "b": 1}, 6: {"a": 9, "b": 1}}, None, 8)
    assert splits.evals == {"a": [1], "b": [2], "b_test": [3]}

    def batches(size: int, rank: int) -> TrainBatches:
        return TrainBatches(splits.train, plan_batches(8, 2, size), rank, 0, CPU)

    def rows(step: Any) -> list[tuple[int, float]]:
        return [
            (number, row) for batch in step for number, [row] in zip(batch[0].tolist(), batch[1].tolist(), strict=True)
        ]

    whole = [rows(step) for step in batches(1, 0).steps(0, 40)]
    assert batches(1, 0).steps_per_epoch == 17
    assert all(number == row for step in whole for number, row in step)
    for size in (2, 4):
        ranks = [batches(size, rank).steps(11, 40) for rank in range(size)]
        assert [[row for rank in step for row in rows(rank)] for step in zip(*ranks, strict=True)] == whole[11:]
    counts = [sum(number >= 1000 for number, _ in step) for step in whole]
    assert abs(sum(counts[:6]) - 24) <= 2
    assert abs(sum(counts[6:]) - 0.1 * 34 * 8) <= 2


def test_a_part_can_be_held_out() -> None:
    train = mix({"a": Splits(points(100, 0), {}), "b": Splits(points(40, 1000), {})}, None, None, 8).train
    kept, held = hold_out(train, 0.1)
    assert (len(kept), len(held)) == (126, 14)
    of_kept = set(kept.gather(torch.arange(126), CPU)[0].tolist())
    assert of_kept.isdisjoint(held.gather(torch.arange(14), CPU)[0].tolist())
    visited = kept.order(0, 0)(np.arange(kept.samples_per_epoch))
    assert visited.max() < 126


def test_sources_that_do_not_fit_together_are_named() -> None:
    other = Arrays((torch.zeros(40, 3), torch.zeros(40)))
    train = mix({"a": Splits(points(100, 0), {}), "b": Splits(adapted(other), {})}, None, None, 8).train
    with refused("data.sources", DdpexpError):
        train.gather(torch.tensor([0, 1, 100, 101]), CPU)
    with refused("mixture"):
        mix({"a": Splits(points(100, 0), {}), "b": Splits(points(40, 0), {})}, None, None, 256)


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    return warm_environ


MIXED = (
    "data=mixture", "+data@data.sources.a=points", "+data@data.sources.b=points",
    "~data.sources.a.num_workers", "~data.sources.b.num_workers", "~data.sources.a.validation_fraction",
    "~data.sources.b.validation_fraction", "data.sources.a.train=50", "trainer.max_steps=40", "trainer.epochs=null",
    "data.source_weights={0: {a: 0.5, b: 0.5}, 20: {a: 0.1, b: 0.9}}", "trainer.micro_batch_size=6",
    "trainer.reduction=exact", "trainer.checkpoint_every=5", "trainer.eval_every=20", "+task.pace=0",
)  # fmt: skip
CODE = """\
class Paced(Sides):
    def __init__(self, pace=0):
        pass

    def step(self, model, batch):
        time.sleep(float(os.environ.get("PACE", "0")))
        return super().step(model, batch)
"""


@pytest.mark.slow
def test_killed_twenty_times_the_run_ends_with_the_same_result(tmp_path: Path, environ: dict[str, str]) -> None:
    recipe = Recipe(Ddpexp(tmp_path, environ), CODE)
    overrides = (*MIXED, "task._target_=points.Paced")
    undisturbed = recipe(*overrides)
    assert undisturbed.code == 0, undisturbed.err
    other = recipe(*overrides, "data.source_weights={0: {a: 0.5, b: 0.5}, 21: {a: 0.1, b: 0.9}}", run=undisturbed.run)
    assert (other.code, "data.source_weights" in other.err) == (2, True), other.err
    for number in range(20):
        chance = random.Random(number)
        process, run = recipe.start(*overrides, f"trainer.gpus={(1, 2, 4)[number % 3]}", environ={"PACE": "0.02"})
        time.sleep(chance.uniform(0.6, 2.5))
        kill_everything(process, run)
        same(recipe(*overrides, f"trainer.gpus={chance.choice((1, 2, 4))}", run=run), undisturbed)
