"""Columns of inputs: read block by block, and encoded as numbers by their fields of the schema."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpexp.data.arrays.targets import codes_of
from ddpexp.data.arrays.texts import (
    days_of,
    has_leading_zeros,
    is_missing,
    not_a_date,
    not_a_number,
    numbers_of,
    numbers_or_missing,
)  # fmt: skip
from ddpexp.data.schema import STATISTICS, Field, Kind
from ddpexp.errors import RefusedError

OWN_CATEGORY = "(missing)"  # the name of the category that data.missing={COLUMN: category} adds
_MOST_CATEGORIES = 1000
_INDEX = re.compile(r"|Unnamed: 0|__index_level_\d+__")  # the names that pandas gives an index without one
_TYPED = re.compile(r"\w[\w.-]*")
_FEWEST_ROWS = 10  # fewer rows are counted by many columns


@dataclass
class Reader:
    """The values of one column, as they are read; `column` has categories if the training part has decided them."""

    column: Field
    where: str  # for messages
    dtype: str
    is_fixed: bool = False  # by a trained run, which reads columns as its training part was read
    blocks: list[Any] = field(default_factory=list)
    guesses: list[str] = field(default_factory=list)

    def add(self, values: Sequence[str] | NDArray[Any], row: int) -> None:
        """Take the next values, of which the first stands in `row`, counted from 1. Raises: RefusedError."""
        if self.column.kind in ("category", "text"):
            self.blocks.append(_names(values))
        elif self.column.kind == "date":
            self.blocks.append(self._filled(*days_of(values), values, row))
        else:
            self.blocks.append(self._numbers(values, row))

    def _numbers(self, values: Sequence[str] | NDArray[Any], row: int) -> NDArray[Any]:
        if isinstance(values, np.ndarray):
            if values.dtype.kind not in "biuf":
                raise not_a_number(self.where, values[0], row, use=self._use())
            return values if values.dtype.kind != "f" else self._filled(values.astype(np.float64), None, values, row)
        if self.dtype == "int64" and (found := numbers_of(values, whole=True)) is not None:
            return found
        found = numbers_of(values)
        if found is None:
            values = [value.strip() for value in values]
            found = numbers_of(values)
        if found is None:
            return self._filled(*numbers_or_missing(values), values, row)
        if not self.guesses and has_leading_zeros(values):
            self.guesses.append(
                f"{self.where} holds numbers with leading zeros, and names are read as they stand there with"
                f"{_key(self.column.name, 'category').lstrip(':')}"
            )
        return found

    def _filled(self, found: NDArray[np.float64], wrong: int | None, values: Any, row: int) -> NDArray[np.float64]:
        """Return numbers with a value, or NaN for a rule, in place of those that are missing."""
        if wrong is None and not (missing := np.isnan(found)).any():
            return found
        rule = self.column.missing
        if wrong is not None or rule is None:
            place = wrong if wrong is not None else int(np.flatnonzero(missing)[0])
            if self.column.kind == "date" and wrong is not None:
                raise not_a_date(self.where, values[place], row + place)
            fill = "" if self.is_fixed else f", or fill it{_key(self.column.name, 'median', 'missing')}"
            raise not_a_number(self.where, values[place], row + place, fill, self._use())
        if rule not in STATISTICS:
            found[missing] = rule
        return found

    def _use(self) -> str:
        if self.is_fixed:
            return " in the file, since the run was trained on numbers of this column"
        return f", choose columns of numbers with data.inputs, or read names{_key(self.column.name, 'category')}"

    def done(self, listed: str) -> tuple[Field, NDArray[Any]]:
        """Return the field, with categories, and the numbers. Shapes: (rows,), of categories (rows, categories).

        Raises:
            RefusedError: a name is missing, or is none of the categories, which `listed` has.
        """
        if self.column.kind not in ("category", "text"):
            return self.column, np.concatenate(self.blocks)
        names = [name for block in self.blocks for name in block]
        if self.column.missing is not None:
            names = [str(self.column.missing) if is_missing(name, among_numbers=False) else name for name in names]
        elif (row := next((row for row, name in enumerate(names, 1) if is_missing(name, False)), None)) is not None:
            holds = "is empty" if not names[row - 1] else f"holds {names[row - 1]!r}"
            raise RefusedError(
                f"{holds} in row {row:,}, where a category is needed",
                suggestion="Leave the row out, or make it a category of its own"
                f"{_key(self.column.name, 'category', 'missing')}.",
                place=self.where,
            )
        categories = self.column.categories or self._categories(names)
        found = replace(self.column, kind="category", categories=categories)
        codes = codes_of(found, names, self.where, listed)
        if self.dtype == "int64":
            return found, codes
        columns = np.zeros((len(codes), len(categories)), np.float64)
        columns[np.arange(len(codes)), codes] = 1
        return found, columns

    def _categories(self, names: Sequence[str]) -> tuple[str, ...]:
        found = sorted({*names, *([str(self.column.missing)] if self.column.missing is not None else [])})
        if len(found) > _MOST_CATEGORIES:
            raise RefusedError(
                f"holds {len(found):,} different names, but a column may have at most {_MOST_CATEGORIES:,} categories",
                suggestion=f"Leave the column out{_key(self.column.name, 'drop')}.",
                place=self.where,
            )
        return tuple(found)


def field_of(name: str, kind: Kind, missing: Mapping[str, str | float], dtype: str) -> Field:
    """Return a column of inputs as the options declare it. Raises: RefusedError, if a rule of data.missing is wrong."""
    if name not in missing:
        return Field(name, kind)
    rule, key = missing[name], f"data.missing.{name}={missing[name]}"
    if kind in ("category", "text"):
        if rule in STATISTICS:
            raise RefusedError(
                f"Column {name} holds names, which have no {rule}", key=key, suggestion="Use category, or a name."
            )
        return Field(name, kind, missing=OWN_CATEGORY if rule == "category" else str(rule))
    if rule in STATISTICS:
        if dtype == "int64":
            raise RefusedError(
                f"A {rule} may be a fraction, but data.dtype=int64 needs whole numbers",
                key=key,
                suggestion="Use a number.",
            )
        return Field(name, kind, missing=str(rule))
    if kind == "date" and isinstance(rule, str):
        found, wrong = days_of([rule])
        if wrong is None and not np.isnan(found[0]):
            return Field(name, kind, missing=float(found[0]))
    if isinstance(rule, str):
        raise RefusedError(f"Column {name} holds {kind}s", key=key, suggestion=f"Use mean, median, or a {kind}.")
    return Field(name, kind, missing=float(rule))


def is_index(found: Field, values: NDArray[Any]) -> bool:
    """Return whether a column of the training part is an index that pandas has written without a name."""
    if found.kind != "number" or found.name is None or not _INDEX.fullmatch(found.name):
        return False
    return len(np.unique(values)) == len(values) and bool((values == np.floor(values)).all())


def doubts(found: Field, values: NDArray[Any], where: str) -> list[str]:
    """Return a line if a column of numbers counts the rows."""
    if found.kind != "number" or len(values) < _FEWEST_ROWS or values[0] not in (0, 1):
        return []
    if values[-1] - values[0] != len(values) - 1 or (np.diff(values) != 1).any():
        return []
    return [f"{where} counts the rows, and is an input{_key(found.name, 'drop')} leaves it out"]


def _names(values: Sequence[str] | NDArray[Any]) -> list[str]:
    if not isinstance(values, np.ndarray):
        return [value.strip() for value in values]
    if values.dtype.kind == "f":
        return list(map(_number_name, values))
    return list(map(str, values.tolist()))


def _number_name(value: np.floating[Any]) -> str:
    if np.isnan(value):
        return ""
    return str(int(value)) if value == np.floor(value) else str(value)


def _key(name: str | None, kind: str, section: str = "columns") -> str:
    """Return the key that settles it, as it is typed after a sentence."""
    if name is None or not _TYPED.fullmatch(name):
        return f": data.{section}"
    with_key = f"data.{section}={{{name}: {kind}}}"
    return f" with {with_key}" if section == "missing" else f": {with_key}"
