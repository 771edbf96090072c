"""Data sets that answer a batch of indices, and the part of one that is held out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from ddpexp.data.adapters import MapStyle
from ddpexp.data.datasets import Arrays, IndexData, Splits, Subset, choose_samples, on_device
from ddpexp.data.order import Order
from tests.orders import hold_out
from tests.refusals import refused

CPU = torch.device("cpu")


def numbers(count: int) -> Arrays:
    return Arrays((torch.arange(count), torch.arange(count) * 2), lambda index, double: (index, double + 1))


def all_of(part: IndexData) -> list[int]:
    found: list[int] = part.gather(torch.arange(len(part)), CPU)[0].tolist()
    return found


def test_arrays_gather_rows_in_the_requested_order_and_transform_them() -> None:
    index, other = numbers(10).gather(torch.tensor([7, 0, 7]), CPU)
    assert index.tolist() == [7, 0, 7]
    assert other.tolist() == [15, 1, 15]


def test_arrays_without_a_transform_give_the_rows() -> None:
    data = Arrays((torch.arange(4), torch.eye(4)))
    assert len(data) == 4
    index, rows = data.gather(torch.tensor([2]), CPU)
    assert (index.tolist(), rows.tolist()) == ([2], [[0, 0, 1, 0]])


@pytest.mark.parametrize(
    ("count", "fraction", "held"), [(100, 0.1, 10), (5000, 0.25, 1250), (7, 0.01, 1), (2, 0.99, 1), (10, 0.99, 9)]
)
def test_a_held_out_part_and_the_rest_are_the_whole_and_share_nothing(count: int, fraction: float, held: int) -> None:
    kept, out = hold_out(numbers(count), fraction)
    assert (len(kept), len(out)) == (count - held, held)
    assert sorted(all_of(kept) + all_of(out)) == list(range(count))


def test_the_division_is_the_same_in_every_run_and_no_mere_cut() -> None:
    kept, out = hold_out(numbers(1000), 0.2)
    again, same = hold_out(numbers(1000), 0.2)
    assert (all_of(kept), all_of(out)) == (all_of(again), all_of(same))
    assert all_of(out) != list(range(800, 1000))
    assert isinstance(out, Subset)
    assert abs(np.mean(all_of(out)) - 499.5) < 75  # a fair sample of the whole


def test_a_map_style_set_is_divided_alike() -> None:
    items = TensorDataset(torch.arange(100))
    kept, out = hold_out(MapStyle(items), 0.1)
    _, expected = hold_out(numbers(100), 0.1)
    assert [int(out[index][0]) for index in range(10)] == all_of(expected)
    assert len(kept) == 90


def test_rows_that_lie_on_the_device_are_the_same_also_of_a_part_of_a_part() -> None:
    kept, out = hold_out(numbers(100), 0.3)
    inner, last = hold_out(kept, 0.5)
    there = on_device(Splits(inner, {"last": last, "out": out}), CPU)
    assert [all_of(part) for part in (there.train, *there.evals.values())] == [
        all_of(part) for part in (inner, last, out)
    ]


def test_what_cannot_lie_on_the_device_is_refused() -> None:
    with refused("data.on_device=true"):
        on_device(Splits(numbers(4), {"eval": MapStyle(TensorDataset(torch.arange(3)))}), CPU)


class Pairs(Arrays):
    """Rows whose epochs visit the even ones twice."""

    @property
    def samples_per_epoch(self) -> int:
        return len(self) // 2 * 2

    def order(self, seed: int, epoch: int) -> Order:
        return lambda positions: positions // 2 * 2


class Parts(Pairs):
    def select(self, indices: NDArray[np.int64]) -> Parts:
        return Parts([tensor[torch.from_numpy(indices)] for tensor in self.tensors])


def test_a_part_of_a_set_with_its_own_order_keeps_an_order_of_its_own() -> None:
    rows = torch.arange(10)
    kept, held = hold_out(Parts([rows]), 0.3)
    expected, held_of_others = hold_out(Arrays([rows]), 0.3)
    assert (all_of(kept), all_of(held)) == (all_of(expected), all_of(held_of_others))
    assert kept.samples_per_epoch == 6
    assert not held.brings_order
    assert isinstance(choose_samples(Parts([rows]), 4), Parts)


def test_a_set_with_its_own_order_and_no_parts_is_not_divided() -> None:
    with refused("data.validation_fraction=0.3"):
        hold_out(Pairs([torch.arange(10)]), 0.3)
    with refused("trainer.limit_train_samples=4: select(indices)"):
        choose_samples(Pairs([torch.arange(10)]), 4)


def test_a_set_on_the_device_keeps_its_order() -> None:
    data = Pairs([torch.arange(10)])
    assert on_device(Splits(data, {}), CPU).order is data
    assert on_device(Splits(Arrays([torch.arange(10)]), {}), CPU).order is None
