"""Samples that are held out and drawn, by the keys of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.data.adapters import adapted
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import TrainBatches
from ddpexp.data.datasets import Arrays, Splits
from ddpexp.data.lengths import ByLength
from ddpexp.data.token_batches import ByTokens
from ddpexp.distributed.world import World
from ddpexp.train.choose_samples import arrange
from tests.orders import Shuffled
from tests.refusals import refused

CPU = torch.device("cpu")
ALONE = World(0, 0, 0, 1, 1, CPU)
LABELS = np.array([0] * 160 + [1] * 40)


class Items(Dataset[tuple[int, int]]):
    """A map-style set with labels and groups."""

    def __init__(self, count: int = 200) -> None:
        self.targets = LABELS[:count].tolist()
        self.patients = [f"p{index // 8}" for index in range(count)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, self.targets[index]


class Bare(Dataset[int]):
    """A map-style set of which nothing is known."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> int:
        return index


def by_label(data: Arrays, factor: float) -> list[float]:
    return [1.0 + (factor - 1) * int(label) for label in data.tensors[1]]


def rows() -> Arrays:
    return Arrays([torch.arange(200), torch.from_numpy(LABELS)])


def arranged(data: Any, *overrides: str) -> Splits:
    made = compose(["data.source=embedded", "trainer.global_batch_size=20", "trainer.gpus=1", *overrides])
    return arrange(Splits(adapted(data), {}), parse(made.values), ALONE)


def seen(splits: Splits, steps: int, size: int = 1) -> list[list[int]]:
    """Return the samples of each global batch."""
    parts = [
        TrainBatches(splits.train, plan_batches(20, "auto", size), rank, 0, CPU, order=splits.order).steps(0, steps)
        for rank in range(size)
    ]
    return [[int(index) for [batch] in step for index in batch[0]] for step in zip(*parts, strict=True)]


def held_out(splits: Splits) -> list[int]:
    part = splits.evals["validation"]
    return list(map(int, part.gather(torch.arange(len(part)), CPU)[0]))


@pytest.mark.parametrize("kind", [rows, Items])
def test_balanced_classes_are_drawn_alike_by_any_number_of_workers(kind: Any) -> None:
    splits = arranged(kind(), "data.weights=balanced", "data.folds=5", "data.fold=1", "data.samples_per_epoch=100")
    alone = seen(splits, 15)
    assert alone == seen(splits, 15, 2) == seen(splits, 15, 4)
    assert not {index for step in alone for index in step} & set(held_out(splits))
    for epoch in range(3):
        drawn = [index for step in alone[5 * epoch : 5 * epoch + 5] for index in step]
        assert abs(int(LABELS[drawn].sum()) - 50) < 2


@pytest.mark.parametrize("kind", [rows, Items])
def test_folds_hold_out_each_sample_once_and_each_class_by_its_share(kind: Any) -> None:
    held = [held_out(arranged(kind(), "data.folds=4", f"data.fold={fold}")) for fold in range(4)]
    assert sorted(index for fold in held for index in fold) == list(range(200))
    assert {int(LABELS[fold].sum()) for fold in held} == {10}


def test_a_fraction_is_stratified_on_request_and_groups_stay_together(tmp_path: Path) -> None:
    held = held_out(arranged(rows(), "data.validation_fraction=0.1", "data.stratify=true"))
    assert (len(held), int(LABELS[held].sum())) == (20, 4)
    held = held_out(arranged(Items(), "data.folds=5", "data.fold=2", "data.group_by=patients"))
    assert all(index - index % 8 + other in held for index in held for other in range(8))
    (tmp_path / "groups.txt").write_text("\n".join(Items().patients))
    file = f"data.group_by={tmp_path}/groups.txt"
    assert held_out(arranged(rows(), "data.folds=5", "data.fold=2", file)) == sorted(held)


def test_an_evaluation_set_may_be_the_test_of_a_run() -> None:
    splits = arranged(rows(), "data.validation_fraction=0.1", "data.test_set=validation")
    assert {name: len(data) for name, data in splits.evals.items()} == {"test": 20}


def test_weights_of_a_file_follow_the_samples_through_what_is_left_out(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.where(np.arange(200) % 3 == 0, 1.0, 0.0))
    splits = arranged(
        rows(), f"data.weights={tmp_path}/w.npy", "data.validation_fraction=0.2", "trainer.limit_train_samples=90"
    )
    assert {index % 3 for step in seen(splits, 8) for index in step} == {0}
    assert splits.order is not None
    assert splits.order.samples_per_epoch == 90


def test_weights_may_come_from_a_function() -> None:
    function = f"data.weights={{_target_: {__name__}.by_label, factor: 4}}"
    splits = arranged(rows(), function, f"run.trust=[{__name__}]")
    drawn = [index for step in seen(splits, 10) for index in step]
    assert abs(int(LABELS[drawn].sum()) - 100) < 6


@pytest.mark.parametrize(
    ("data", "overrides", "message"),
    [
        (Bare(), ["data.weights=balanced"], "data.weights=balanced"),
        (Bare(), ["data.validation_fraction=0.1", "data.stratify=true"], "data.stratify=true: labels"),
        (rows(), ["data.folds=5", "data.fold=0", "data.group_by=house"], "data.group_by=house"),
        (
            rows(),
            ["data.folds=500", "data.fold=0"],
            "data.folds=500",
        ),
        (rows(), ["data.fold=1"], "data.fold=1"),
        (rows(), ["data.test_set=eval"], "data.test_set=eval"),
        (
            rows(),
            ["data.test_set=validaton", "data.validation_fraction=0.1"],
            "data.test_set=validaton: data.test_set=validation?",
        ),
        (rows(), ["data.folds=5"], "data.folds=5"),
        (rows(), ["data.folds=5", "data.fold=5"], "data.fold=5"),
        (rows(), ["data.folds=1", "data.fold=0"], "data.folds=1"),
        (rows(), ["data.folds=5", "data.fold=0", "data.validation_fraction=0.1"], "data.validation_fraction=0.1"),
        (rows(), ["data.stratify=true"], "data.stratify=true: held"),
        (rows(), ["data.group_by=x"], "data.group_by=x"),
        (rows(), ["data.weights=balance"], "data.weights=balance"),
        (rows(), ["data.weights=none.npy"], "data.weights=none.npy"),
        (
            rows(),
            ["data.lengths=words"],
            "data.lengths=words",
        ),
        (rows(), ["data.lengths=none.npy"], "data.lengths=none.npy"),
        (rows(), ["data.batch_tokens=9"], "data.batch_tokens=9: lengths"),
        (Items(), ["data.lengths=targets", "data.batch_tokens=0"], "data.batch_tokens=0"),
        (
            Items(),
            ["data.lengths=targets", "data.batch_tokens=9", "data.weights=balanced"],
            "data.batch_tokens=9: weights",
        ),
        (rows(), ["data.samples_per_epoch=0"], "data.samples_per_epoch=0"),
        (
            rows(),
            ["data.samples_per_epoch=10"],
            "data.samples_per_epoch=10",
        ),
    ],
)
def test_what_means_nothing_is_refused(data: Any, overrides: list[str], message: str) -> None:
    with refused(message):
        arranged(data, *overrides)


def test_lengths_are_those_of_the_samples_that_are_trained_on(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.arange(200))
    key = f"data.lengths={tmp_path / 'lengths.npy'}"
    for more in ([], ["data.folds=5", "data.fold=1"], ["trainer.limit_train_samples=100", "data.weights=balanced"]):
        splits = arranged(Items(), key, *more)
        assert isinstance(splits.order, ByLength)
        visited = splits.order.order(0, 0)(np.arange(splits.order.samples_per_epoch))
        batches = np.array([splits.train[index][0] for index in visited])[:80].reshape(-1, 20)
        assert (np.diff(batches, axis=1) >= 0).all()


@pytest.mark.parametrize(
    "key", ["data.validation_fraction=0.1", "data.folds=5 data.fold=1", "trainer.limit_train_samples=150"]
)
def test_no_part_is_taken_of_data_whose_order_is_of_all_its_samples(key: str) -> None:
    made = compose(["data.source=embedded", "trainer.gpus=1", *key.split()])
    with refused(key.split()[0]):
        arrange(Splits(rows(), {}, Shuffled(200)), parse(made.values), ALONE)


def test_batches_by_tokens_are_of_the_samples_that_are_trained_on(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.arange(200))
    keys = f"data.lengths={tmp_path / 'lengths.npy'}", "data.batch_tokens=800", "trainer.global_batch_size=2"
    splits = arranged(Items(), *keys, "data.folds=5", "data.fold=1")
    assert isinstance(splits.order, ByTokens)
    batches = TrainBatches(splits.train, plan_batches(2, 1, 1), 0, 0, CPU, order=splits.order)
    seen_ones = [[index.tolist() for index, _ in step] for step in batches.steps(0, batches.steps_per_epoch)]
    assert all(max(batch) * len(batch) <= 800 for step in seen_ones for batch in step)
    assert not {index for step in seen_ones for batch in step for index in batch} & set(held_out(splits))
    with refused("data.batch_tokens=800"):
        arranged(rows(), *keys)
