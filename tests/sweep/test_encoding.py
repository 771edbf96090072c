"""Colours and line styles: what differs between jobs is seen, and few jobs never look alike."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from ddpexp.sweep.encoding import COLORS, Encoding, is_geometric, numbers, ordered
from ddpexp.sweep.rows import Row


def rows(**swept: list[str]) -> list[Row]:
    """Return the jobs of a grid; `_` in a key stands for a dot."""
    keys = [key.replace("_", ".") for key in swept]
    found = []
    for number, values in enumerate(itertools.product(*swept.values())):
        facts: dict[str, Any] = {
            "metrics": {},
            "step": 1,
            "seconds": 1.0,
            "job": None,
            "message": None,
            "started": 0.0,
        }
        overrides = dict(zip(keys, values, strict=True))
        path = Path(f"/{number:04d}")
        found.append(Row(number, path.name, path, overrides, "done", 0.5, ended=1.0, values=overrides, **facts))
    return found


def looks(found: list[Row]) -> list[tuple[Any, Any]]:
    encoding = Encoding.of(found)
    return [(encoding.looks[row.path].color, encoding.looks[row.path].style) for row in found]


@pytest.mark.parametrize(
    "swept",
    [
        {"optimizer_lr": ["0.1", "0.2"]},
        {"trainer_seed": ["0", "1"]},
        {"optimizer_lr": ["0.1", "0.2", "0.3"], "trainer_seed": ["0", "1"]},
        {"optimizer_lr": ["0.1", "0.2"], "model": ["a", "b", "c"]},
        {"optimizer_lr": ["0.1", "0.2"], "model": ["a", "b"], "optimizer": ["c", "d"]},
        {"optimizer_lr": [f"0.{number}" for number in range(1, 7)], "trainer_seed": ["0", "1", "2", "3"]},
        {"optimizer_lr": [f"0.{number:02d}" for number in range(1, 21)], "model": ["a", "b"]},
        {"trainer_seed": list(map(str, range(100)))},
    ],
)
def test_no_two_jobs_look_alike(swept: dict[str, list[str]]) -> None:
    found = looks(rows(**swept))
    assert len(set(found)) == len(found)


def test_the_colour_is_the_key_that_distinguishes_most_jobs_and_the_style_another_key() -> None:
    encoding = Encoding.of(rows(model=["a", "b"], optimizer_lr=["0.1", "0.3", "0.2"], trainer_seed=["0", "1"]))
    assert (encoding.color_key, encoding.style_key) == ("optimizer.lr", "model")
    assert list(encoding.colors) == ["0.1", "0.2", "0.3"]
    assert list(encoding.styles) == ["a", "b"]


def test_seeds_of_one_setting_share_its_colour() -> None:
    found = rows(optimizer_lr=["0.1", "0.2", "0.3"], trainer_seed=list(map(str, range(8))))
    encoding = Encoding.of(found)
    assert (encoding.color_key, encoding.style_key) == ("optimizer.lr", None)
    assert len({encoding.looks[row.path].color for row in found}) == 3


def test_many_numbers_are_on_a_scale_and_a_few_in_the_legend() -> None:
    few = Encoding.of(rows(optimizer_lr=[f"0.{number}" for number in range(1, 10)]))
    assert (few.scale, len(few.colors)) == (None, 9)
    many = Encoding.of(rows(optimizer_lr=[f"0.{number:02d}" for number in range(1, 50)]))
    assert many.scale is not None
    assert many.colors == {}


def test_texts_that_are_too_many_for_a_legend_do_not_take_the_colour() -> None:
    found = Encoding.of(rows(data_file=[f"part{number}" for number in range(20)], optimizer_lr=["0.1", "0.2"]))
    assert found.color_key == "optimizer.lr"


def test_few_jobs_of_many_keys_have_a_colour_each() -> None:
    encoding = Encoding.of(rows(optimizer_lr=["0.1", "0.2"], model=["a", "b"], optimizer=["c", "d"]))
    assert encoding.color_key == "lr, model, optimizer"
    assert list(encoding.colors)[:2] == ["0.1, a, c", "0.1, a, d"]
    assert list(encoding.colors.values()) == list(COLORS[:8])


def test_one_job_and_jobs_that_do_not_differ_are_drawn() -> None:
    assert looks(rows(optimizer_lr=["0.1"])) == [(COLORS[0], "-")]
    assert looks(rows(optimizer_lr=["0.1"]) * 2) == [(COLORS[0], "-")] * 2
    assert Encoding.of([]).looks == {}


def test_values_stand_in_the_order_of_their_size() -> None:
    assert ordered(["b", "10", "9", "a", "1e-3", "nan"]) == ["1e-3", "9", "10", "b", "a", "nan"]
    assert numbers(["1", "x", "nan", "1e300", "0"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("values", "is_so"),
    [
        ([1, 10, 100], True),
        ([16, 32, 64], True),
        ([1, 2, 3], False),
        ([0, 1, 10], False),
        ([0.1, 1], False),
        ([1, 2, 300], True),
    ],
)
def test_numbers_over_decades_or_doubled_want_a_logarithmic_axis(values: list[float], is_so: bool) -> None:
    assert is_geometric(values) == is_so
