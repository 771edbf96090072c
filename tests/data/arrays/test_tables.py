"""Tables of very many columns: the work grows with their number, not with its square."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpexp.data.arrays import to_predict
from ddpexp.data.arrays.prepare import prepare

MOST = 5  # comparisons of names for each column
COUNT = 300


class Name(str):
    """A name that counts how often it is compared, equal or not, with another one."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


@pytest.fixture(autouse=True)
def _counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the names in files counted."""
    plain = csv.reader

    def reader(*arguments: Any, **options: Any) -> Iterator[list[str]]:
        rows = plain(*arguments, **options)
        yield [Name(name) for name in next(rows)]
        yield from rows

    monkeypatch.setattr("csv.reader", reader)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def names_from(first: int, count: int) -> tuple[str, ...]:
    return tuple(Name(f"column {number}") for number in range(first, first + count))


def table(name: str = "t.csv") -> dict[str, Any]:
    """Write a file of twice COUNT columns of numbers, and one of classes; return the option that names it."""
    header = [*names_from(0, 2 * COUNT), "kind"]
    rows = ([*map(str, range(row, row + 2 * COUNT)), "ab"[row]] for row in range(2))
    Path(name).write_text("".join(f"{','.join(row)}\n" for row in (header, *rows)))
    return {"path": name}


@pytest.mark.parametrize(
    ("options", "num_features"),
    [
        (lambda: {"targets": "kind"}, 2 * COUNT),
        (lambda: {"targets": "kind", "group_by": "column 0"}, 2 * COUNT - 1),
        (lambda: {"targets": "kind", "inputs": names_from(0, 2 * COUNT)}, 2 * COUNT),
        (lambda: {"targets": names_from(0, COUNT), "inputs": names_from(COUNT, COUNT)}, COUNT),
        (lambda: {"targets": names_from(0, COUNT), "group_by": "kind"}, COUNT),
    ],
    ids=["all but one", "groups", "inputs", "inputs and targets", "all but many"],
)
def test_names_of_columns_are_compared_a_few_times_each(
    options: Callable[[], dict[str, Any]], num_features: int
) -> None:
    given = {**table(), **options()}
    Name.compared = 0
    assert prepare(**given)["facts"]["num_features"] == num_features
    assert 0 < Name.compared < MOST * 2 * COUNT, Name.compared


def test_names_of_columns_to_predict_for_are_compared_a_few_times_each() -> None:
    schema = prepare(**table(), targets=names_from(0, COUNT), inputs=names_from(COUNT, COUNT))["schema"]
    known = {**schema, "inputs": [{**one, "name": Name(one["name"])} for one in schema["inputs"]]}
    Name.compared = 0
    found = to_predict.prepare(known, **table("new.csv"), targets=names_from(0, COUNT))
    assert found["schema"]["inputs"] == schema["inputs"]
    assert 0 < Name.compared < MOST * 2 * COUNT, Name.compared
