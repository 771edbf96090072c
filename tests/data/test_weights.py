"""Samples drawn by weights, and epochs of any length."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpexp.data.order import Permutation
from ddpexp.data.weights import Passes, Weighted, checked_weights, class_balanced, read_values
from tests.refusals import refused


def drawn(order: Any, seed: int = 0, epoch: int = 0) -> np.ndarray:
    found: np.ndarray = order.order(seed, epoch)(np.arange(order.samples_per_epoch))
    return found


def test_an_epoch_draws_each_sample_as_often_as_its_weight_says() -> None:
    weights = np.array([0.0, 1, 2, 3, 4, 0])
    counts = np.bincount(drawn(Weighted.of(weights, 1000)), minlength=6)
    assert np.abs(counts - 1000 * weights / 10).max() < 2
    assert counts[[0, 5]].tolist() == [0, 0]


def test_balanced_classes_have_equal_shares_of_every_epoch() -> None:
    classes = np.array([0] * 9000 + [1] * 900 + [2] * 100)[np.random.default_rng(0).permutation(10000)]
    order = Weighted.of(class_balanced(classes), 3000, classes)
    for epoch in range(5):
        assert np.abs(np.bincount(classes[drawn(order, 0, epoch)]) - 1000).max() < 2
    assert drawn(order, 0, 0).tolist() != drawn(order, 0, 1).tolist() != drawn(order, 1, 1).tolist()


def test_over_epochs_every_sample_has_its_share_and_any_two_meet() -> None:
    order = Weighted.of(np.ones(40), 20)
    epochs = [drawn(order, 0, epoch) for epoch in range(2000)]
    counts = np.bincount(np.concatenate(epochs), minlength=40)
    assert np.abs(counts - 1000).max() < 130  # four standard deviations of independent draws
    together = {tuple(sorted({int(a), int(b)})) for epoch in epochs for a in epoch for b in epoch if a != b}
    assert len(together) == 40 * 39 // 2


def test_draws_are_a_function_of_the_position_alone() -> None:
    order = Weighted.of(np.arange(50.0), 333).order(3, 7)
    every = order(np.arange(333))
    assert np.concatenate([order(np.arange(100, 200)), order(np.arange(100))]).tolist() == [
        *every[100:200],
        *every[:100],
    ]
    assert order(np.arange(6).reshape(2, 3)).tolist() == every[:6].reshape(2, 3).tolist()
    # These indices are what a run of an earlier version drew: resuming relies on them.
    assert every[:8].tolist() == FIRST


FIRST = [35, 26, 20, 28, 41, 46, 42, 45]


@pytest.mark.parametrize("length", [7, 10, 23])
def test_epochs_of_another_length_go_through_all_samples_before_any_comes_again(length: int) -> None:
    order = Passes(length, 10)
    everything = np.concatenate([drawn(order, 5, epoch) for epoch in range(10)])
    for begin in range(0, len(everything), 10):
        assert sorted(everything[begin : begin + 10]) == list(range(10))


def test_a_pass_is_the_permutation_of_its_number_wherever_epochs_begin() -> None:
    whole = np.concatenate([Permutation(10, 5, number)(np.arange(10)) for number in range(7)])
    positions = np.array([[3, 22, 0], [21, 9, 3]])
    for epoch in range(3):
        assert Passes(23, 10).order(5, epoch)(positions).tolist() == whole[epoch * 23 + positions].tolist()


def test_a_place_in_millions_of_passes_over_little_data_is_found_in_little_memory() -> None:
    tracemalloc.start()
    try:
        order = Passes(10**8, 64).order(0, 3)
        found = order(np.arange(10**8 - 64, 10**8))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.tolist() == Permutation(64, 0, 4 * 10**8 // 64 - 1)(np.arange(64)).tolist()
    assert peak < 1 << 20


def test_values_are_read_from_files(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.array([1.0, 2]))
    (tmp_path / "w.txt").write_text("1\n2\n")
    (tmp_path / "w.csv").write_text("weight\n1\n2\n")
    for name in ("w.npy", "w.txt", "w.csv"):
        assert checked_weights(read_values(str(tmp_path / name), "data.weights"), 2, "data.weights").tolist() == [1, 2]


@pytest.mark.parametrize("name", ["w.txt", "w.csv"])
def test_a_byte_order_mark_is_no_value(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("\ufeff0.5\n1e1\n", encoding="utf-8")
    assert checked_weights(read_values(str(tmp_path / name), "data.weights"), 2, "data.weights").tolist() == [0.5, 10]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, -2, 3], "w: weight"),
        ([1, 2, float("nan")], "w: weight"),
        ([1, 2, float("inf")], "w: weight"),
        ([0, 0, 0], "w: weights"),
        ([1, 2], "w: weights"),
        ([[1, 2]], "w: shape"),
        (["a", "b", "c"], "w: value"),
        (["1", "1_0", "3"], "w: value"),
        (["1", "2", "٣"], "w: value"),
    ],
)
def test_weights_that_mean_nothing_are_refused(values: Any, message: str) -> None:
    with refused(message):
        checked_weights(values, 3, "w")


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with refused("data.weights: cannot"):
        read_values(str(tmp_path / "w.npy"), "data.weights")
    (tmp_path / "w.npy").write_bytes(b"garbage")
    with refused("data.weights: array"):
        read_values(str(tmp_path / "w.npy"), "data.weights")
