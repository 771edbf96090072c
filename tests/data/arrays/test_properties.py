"""Properties of tables that are generated: each is held by an oracle that reads the same rows by itself."""

from __future__ import annotations

import csv
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import pytest
import torch

from ddpexp.data.arrays.dataset import load
from ddpexp.data.arrays.prepare import prepare
from ddpexp.data.arrays.statistics import with_statistics
from ddpexp.data.partition import fraction_parts
from ddpexp.errors import RefusedError
from tests.refusals import refused

CPU = torch.device("cpu")
WORDS = ("cat", "dog", "Zoë", "猫", "a b", "x;y", "none so far", "1 of 2", "v1.2.3", "0x10", "two", "ab12")
CODES = ("1", "2", "3", "10", "11", "01", "007", "1_1", "1e1", "1E1", "١", "+1", "unknown", "other", "infinity", "1.0")
WHOLE = tuple(map(str, (*range(12), 31, 500, 10001, 20002, -1, -7)))
MISSING = ("", "n/a", "N/A", "NaN", "null", "<NA>")
WHOLE_DIVISION = {"validation_fraction": 0.0, "fold": None, "folds": None, "stratify": None, "group_by": None}


@pytest.fixture(autouse=True)
def _unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the files to the page cache: no table has to survive a power failure."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@dataclass
class Case:
    """A generated table, in which `columns` have a text for each row."""

    seed: int
    rows: int = 0
    columns: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.rows = self.rows or self.draw.randint(12, 40)
        for name in self.draw.sample(["a", "b", "size", "Länge", "x 1"], self.draw.randint(1, 3)):
            self.columns[name] = [f"{self.draw.gauss(0, 3):.3f}" for _ in range(self.rows)]

    def written(self, path: Path, columns: dict[str, list[str]] | None = None) -> str:
        """Write columns in some order, some delimiter and one of two encodings."""
        columns = self.columns if columns is None else columns
        names = self.draw.sample(list(columns), len(columns))
        quoting: Any = self.draw.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
        with open(path, "w", newline="", encoding=self.draw.choice(["utf-8", "utf-8-sig"])) as file:
            table = csv.writer(file, delimiter=self.draw.choice(",;\t"), quoting=quoting)
            table.writerows([names, *zip(*(columns[name] for name in names), strict=True)])
        return str(path)


def names_of(found: dict[str, Any], part: Any) -> list[str]:
    """Return the name of the class of each sample, as a user would look it up."""
    return [found["facts"]["classes"][label] for label in part.targets.tolist()]


def keeps_names(seed: int, folder: Path) -> bool:
    """A label keeps its name in every part: whichever classes the second part has, in whichever order of columns."""
    case = Case(seed)
    pool = case.draw.sample(WORDS if seed % 3 == 0 else CODES, case.draw.randint(2, 5))
    drawn = [*pool, *case.draw.choices(pool, k=case.rows - len(pool))]
    case.draw.shuffle(drawn)
    case.columns["kind"] = drawn
    few = case.draw.sample(pool, case.draw.randint(1, len(pool)))
    second = {name: values[::-1] for name, values in case.columns.items()}
    second["kind"] = case.draw.choices(few, k=case.rows)
    paths = case.written(folder / "t.csv"), case.written(folder / "e.csv", second)
    options: dict[str, Any] = {"target_type": case.draw.choice(["auto", "class"])}
    if seed % 5 == 0:
        options["classes"] = tuple(case.draw.sample(pool, len(pool)))
    try:
        found = prepare(paths[0], targets="kind", eval_path=paths[1], **options)
    except RefusedError as error:
        is_guess = options["target_type"] == "auto" and any(name[0] in "0123456789+" for name in pool)
        is_signed = "+1" in pool and "classes are numbers" in str(error)
        if not (is_signed or (is_guess and "data.target_type" in str(error))):
            raise AssertionError(str(error)) from error
        return False
    splits = load(found)
    if "num_classes" not in found["facts"]:  # plain numbers, such as 1.0 and 3
        assert splits.evals["eval"].targets.tolist() == list(map(float, second["kind"]))
        return True
    assert names_of(found, splits.train) == drawn
    assert names_of(found, splits.evals["eval"]) == second["kind"]
    if "classes" in options:
        assert found["facts"]["classes"] == list(options["classes"])
    later = prepare(paths[1], targets="kind", **options, schema=found["schema"])  # as a run evaluates and resumes
    assert names_of(later, load(later).train) == second["kind"]
    inputs = splits.evals["eval"].gather(torch.arange(case.rows), CPU)[0]
    for place, name in enumerate(found["facts"]["columns"]):
        assert inputs[:, place].tolist() == pytest.approx(list(map(float, second[name])))
    return True


def refuses_missing(seed: int, folder: Path) -> bool:
    """A missing value, or one that is no number among numbers, is refused with its column, its row and its text."""
    case = Case(seed)
    kinds: Sequence[Callable[[], str]] = (
        lambda: f"{case.draw.gauss(20, 5):.2f}",
        lambda: case.draw.choice(WORDS),
        lambda: str(case.draw.randint(100, 999)),
    )
    kind = case.draw.randrange(3)
    case.columns["target"] = ["cat", "dog", *(kinds[kind]() for _ in range(case.rows - 2))]
    if kind != 1:
        case.columns["target"][:2] = [kinds[kind](), kinds[kind]()]
    column = case.draw.choice(list(case.columns))
    among_names = column == "target" and kind == 1
    odd = (*MISSING, "12,50", "1_0", "-") if not among_names else MISSING
    row, text = case.draw.randrange(case.rows), case.draw.choice(odd)
    case.columns[column][row] = text
    with pytest.raises(RefusedError) as refused:
        prepare(case.written(folder / "t.csv"), targets="target")
    holds = f"holds {text!r}" if text else "is empty"
    assert f"column {column} {holds} in row {row + 1}, " in str(refused.value)
    return True


def standardizes_in_float64(seed: int, folder: Path) -> bool:
    """Standardized columns are those of float64, however large their mean is beside their standard deviation."""
    case = Case(seed)
    offset, spread = 10 ** case.draw.randint(0, 10), 10.0 ** case.draw.randint(-1, 3)
    numbers = [offset + case.draw.randint(-1000, 1000) * spread for _ in range(case.rows)]
    case.columns = {"time": [f"{number:.1f}" for number in numbers], "kind": ["a", "b"] * (case.rows // 2 + 1)}
    case.columns["kind"] = case.columns["kind"][: case.rows]
    prepared = prepare(case.written(folder / "t.csv"), targets="kind", standardize=True)
    data = load(with_statistics(prepared, WHOLE_DIVISION)).train
    found = data.gather(torch.arange(case.rows), CPU)[0][:, 0].tolist()
    mean, std = fmean(numbers), pstdev(numbers)
    assert found == pytest.approx([(number - mean) / std for number in numbers], abs=2e-3)
    return True


def numbers_classes_as_listed(seed: int, folder: Path) -> bool:
    """Classes that are whole numbers are numbered as data.classes lists them, and else by themselves."""
    case = Case(seed)
    pool = case.draw.sample(WHOLE, case.draw.randint(2, 5))
    drawn = [*pool, *case.draw.choices(pool, k=case.rows - len(pool))]
    case.columns["kind"] = drawn
    path = case.written(folder / "t.csv")
    found = prepare(path, targets="kind", classes=tuple(pool))
    assert load(found).train.targets.tolist() == [pool.index(name) for name in drawn]
    assert found["facts"]["classes"] == pool
    if any(int(name) < 0 for name in pool):
        with refused("column kind: data.classes="):
            prepare(path, targets="kind")
        return True
    found = prepare(path, targets="kind")
    assert load(found).train.targets.tolist() == list(map(int, drawn))
    if max(map(int, pool)) >= len(pool):
        assert any("data.classes=[" in line or "predicts amounts" in line for line in found["guesses"])
    return True


def fills_by_what_is_trained_on(seed: int, folder: Path) -> bool:
    """Missing numbers are filled with the mean or the median of the samples that are trained on, or with a value."""
    case = Case(seed)
    numbers = [None if case.draw.random() < 0.2 else case.draw.randint(0, 99) for _ in range(case.rows)]
    numbers[:4] = [None, 5, None, 7]
    case.columns = {"age": ["" if number is None else str(number) for number in numbers]}
    case.columns |= {
        "city": case.draw.choices(["x", "y", ""], k=case.rows),
        "kind": case.draw.choices("ab", k=case.rows),
    }
    case.columns["kind"][:2] = "ab"
    rule = case.draw.choice(["mean", "median", -1.0])
    options: dict[str, Any] = {"missing": {"age": rule, "city": "category"}, "columns": {"city": "category"}}
    prepared = prepare(case.written(folder / "t.csv"), targets="kind", **options)
    data = load(with_statistics(prepared, {**WHOLE_DIVISION, "validation_fraction": 0.25})).train
    kept, _ = fraction_parts(case.rows, 0.25, None, None)
    known = [number for row in kept.indices().tolist() if (number := numbers[row]) is not None]
    fill = fmean(known) if rule == "mean" else median(known) if rule == "median" else -1.0
    names = prepared["facts"]["columns"]
    inputs = data.gather(torch.arange(case.rows), CPU)[0]
    ages = [fill if number is None else number for number in numbers]
    assert inputs[:, names.index("age")].tolist() == pytest.approx(ages)
    cities = [name or "(missing)" for name in case.columns["city"]]
    for row, city in enumerate(cities):
        assert [name for name, one in zip(names, inputs[row], strict=True) if name != "age" and one] == [f"city={city}"]
    return True


PROPERTIES = (
    keeps_names, refuses_missing, standardizes_in_float64, numbers_classes_as_listed, fills_by_what_is_trained_on,
)  # fmt: skip


def check(holds: Callable[[int, Path], bool], seeds: range, tmp_path: Path) -> None:
    """Try a property with tables of all seeds; most must be read, and not refused as doubtful."""
    accepted = 0
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            accepted += holds(seed, folder)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {re.sub(r'/tmp/[^ :]*/', '', str(error))}") from error
    assert accepted > len(seeds) / 2, f"{accepted} of {len(seeds)} tables are read"


@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda holds: holds.__name__)
def test_a_property_of_generated_tables_holds(holds: Callable[[int, Path], bool], tmp_path: Path) -> None:
    check(holds, range(40), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(40, 2_040, 250))
@pytest.mark.parametrize("holds", PROPERTIES, ids=lambda holds: holds.__name__)
def test_a_property_of_many_generated_tables_holds(
    holds: Callable[[int, Path], bool], begin: int, tmp_path: Path
) -> None:
    check(holds, range(begin, begin + 250), tmp_path)
