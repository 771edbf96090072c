"""Data sets that answer a batch of indices, and the part of one that is held out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from ddpexp.data.datasets import Arrays, IndexData, Splits, Subset, hold_out, on_device
from ddpexp.errors import RefusedError

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
    assert isinstance(numbers(10), IndexData)
    assert not isinstance(TensorDataset(torch.arange(3)), IndexData)


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
    kept, out = hold_out(items, 0.1)
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
    with pytest.raises(RefusedError, match=r"data\.on_device=true: `eval` is a TensorDataset, which cannot be moved"):
        on_device(Splits(numbers(4), {"eval": TensorDataset(torch.arange(3))}), CPU)
