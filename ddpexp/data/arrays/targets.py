"""Targets: what the training part's are, classes or numbers, and those of every part as numbers by that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpexp.data.arrays.sources import ColumnOptions
from ddpexp.data.arrays.tables import Values
from ddpexp.data.arrays.texts import (
    NUMBER,
    PLAIN,
    WHOLE,
    dates,
    is_decimal_comma,
    is_missing,
    is_whole,
    loses_digits,
    not_a_number,
    numbers_of,
    numbers_or_missing,
)  # fmt: skip
from ddpexp.data.schema import Field
from ddpexp.errors import RefusedError
from ddpexp.system.text import first_few

_MOST_CLASSES = 100_000
_FEW_OF_A_CLASS = 10  # samples; below that whole numbers may be amounts
_RARE = 4  # samples of a value; below that whole numbers beside a text are amounts
_NEARLY_ALL = 0.9
_BY_CLASS = ", or use data.target_type=class if these are names of classes"


@dataclass(frozen=True)
class TargetColumn:
    """A column of targets as it was read."""

    name: str | None
    values: Values
    where: str  # for messages

    def decide(
        self, options: ColumnOptions, declared: str | None, has_others: bool, key: str
    ) -> tuple[Field, list[str]]:
        """Return what the targets are, and a line for each guess that a person could doubt.

        `declared` is the kind in data.columns; of several columns (`has_others`) each holds numbers.

        Raises:
            RefusedError: a value is missing, or is what nearly all others are not.
        """
        if declared == "date":
            return Field(self.name, "date"), []
        wanted = {"number": "number", "category": "class", "text": "class"}.get(str(declared), options.target_type)
        if has_others and wanted == "class":
            raise RefusedError(
                "names several columns, and data.target_type=class needs one", key=key, suggestion="Choose one."
            )
        kind, guesses = ("number", []) if has_others else self._kind(wanted, options.classes)
        if kind == "number":
            return Field(self.name, "number"), guesses
        if options.classes is not None:
            field = self._listed(options.classes)
        else:
            field, more = self._by_content(is_guess=wanted == "auto")
            guesses = [*guesses, *more]
        if len(field.categories or ()) < 2:
            raise RefusedError(
                f"holds one class, {(field.categories or ('',))[0]}, but a classifier needs at least two",
                suggestion="Add samples of another class, or use data.target_type=number.",
                place=self.where,
            )
        return field, guesses

    def _kind(self, wanted: str, classes: Sequence[str] | None) -> tuple[str, list[str]]:
        if wanted != "auto":
            return wanted, []
        if classes is not None:
            return "class", []
        if isinstance(self.values, np.ndarray):
            is_number = self.values.dtype.kind == "f" or self.values.ndim > 1
            return ("number", self._few_numbers()) if is_number else ("class", [])
        return self._kind_of_texts(Counter(self.values))

    def _kind_of_texts(self, counts: Mapping[str, int]) -> tuple[str, list[str]]:
        odd = {text for text in counts if not PLAIN.fullmatch(text)}
        plain = counts.keys() - odd
        are_whole = all(map(is_whole, plain))
        if not odd:
            return ("class", []) if are_whole else ("number", self._few_numbers())
        num_plain = sum(counts[text] for text in plain)
        share, total = num_plain / len(self.values), len(self.values)
        row, text = next((row, text) for row, text in enumerate(self.values, 1) if text in odd)
        are_amounts = share >= _NEARLY_ALL and len(plain) > num_plain / _RARE
        has_commas = sum(counts[one] for one in odd if is_decimal_comma(one)) > total / 2
        if (share >= 0.5 and not are_whole) or are_amounts or has_commas:
            raise not_a_number(self.where, text, row, use=_BY_CLASS)
        if share >= 0.5 and (missing := [one for one in odd if is_missing(one, among_numbers=True)]):
            raise not_a_number(self.where, missing[0], list(self.values).index(missing[0]) + 1, use=_BY_CLASS)
        names = f"{self.where} holds {text!r} in row {row:,}, so its values are names of classes"
        if share >= _NEARLY_ALL:
            return "class", [f"{names}: data.target_type=class if that is right, else correct the row"]
        if all(map(NUMBER.fullmatch, counts)):
            return "class", [f"{names}: data.target_type=number reads numbers"]
        return "class", []

    def _few_numbers(self) -> list[str]:
        """Return a line if the numbers are so few that they may be classes."""
        values = numbers_of(self.values) if not isinstance(self.values, np.ndarray) else self.values
        if values is None or values.ndim > 1:
            return []
        unique = np.unique(values)
        if len(unique) * _FEW_OF_A_CLASS > len(values) or (unique != np.floor(unique)).any():
            return []
        return [
            f"{self.where} holds {len(unique)} different numbers, predicted as amounts: data.target_type=class reads "
            "classes"
        ]

    def _listed(self, classes: Sequence[str]) -> Field:
        """Return classes as data.classes lists them: by their names, or as names of the numbers from 0."""
        twice = next((name for name, count in Counter(classes).items() if count > 1), None)
        if twice is not None:
            raise RefusedError(f"lists {twice} twice", key="data.classes", suggestion="Leave one out.")
        counts = names_of(self.values, self.where)[0]
        are_numbers = all(map(WHOLE.fullmatch, counts)) and counts.keys().isdisjoint(classes)
        return Field(self.name, "category", tuple(classes), numbered=are_numbers)

    def _by_content(self, is_guess: bool) -> tuple[Field, list[str]]:
        counts, row_of = names_of(self.values, self.where)
        if all(map(is_whole, counts)):
            return self._of_whole_numbers(counts, row_of, is_guess)
        missing = next((name for name in counts if is_missing(name, among_numbers=False)), None)
        if missing is not None:
            holds = "is empty" if not missing else f"holds {missing!r}"
            raise RefusedError(
                f"{holds} in row {row_of(missing):,}, where a class is needed",
                suggestion="Leave the row out, put a class there, or list it in data.classes if it is one.",
                place=self.where,
            )
        names, guesses = tuple(sorted(counts)), []
        if len(names) > len(self.values) / 2 and len(self.values) >= _FEW_OF_A_CLASS:
            guesses.append(f"{self.where} holds {len(names):,} different texts, each of which is a class of its own")
        for name in names:
            if is_missing(name, among_numbers=True):
                guesses.append(
                    f"{self.where} holds {name!r} in row {row_of(name):,}, which is a class: data.classes=[...] lists "
                    "the classes"
                )
        return Field(self.name, "category", names), guesses

    def _of_whole_numbers(self, counts: Mapping[str, int], row_of: Any, is_guess: bool) -> tuple[Field, list[str]]:
        """Return classes that are whole numbers: the numbers of the classes themselves."""
        listed = sorted(counts, key=int)
        wrong = next((name for name in counts if not WHOLE.fullmatch(name) or int(name) >= _MOST_CLASSES), None)
        if wrong is not None:
            raise RefusedError(
                f"holds the class {wrong} in row {row_of(wrong):,}: classes are numbers from 0 to "
                f"{_MOST_CLASSES - 1:,}",
                suggestion=f"List other classes by name, data.classes={_typed(listed)}, or use "
                "data.target_type=number.",
                place=self.where,
            )
        names = tuple(map(str, range(int(listed[-1]) + 1)))
        if is_guess and len(names) > len(self.values) / _FEW_OF_A_CLASS and len(listed) > 2:
            return Field(self.name, "category", names), [
                f"{self.where} holds whole numbers, read as {len(names):,} classes: data.target_type=number predicts "
                "amounts"
            ]
        return Field(self.name, "category", names), []


@dataclass(frozen=True)
class Encoded:
    """Targets as numbers. Shapes: values (samples,), or (samples, columns)."""

    fields: Sequence[Field]
    values: NDArray[Any]

    @property
    def num_outputs(self) -> int:
        """Return the number of classes, or of numbers to predict."""
        names = self.fields[0].categories
        return len(names) if names is not None else int(self.values[0].size)

    def doubts(self, where: str) -> list[str]:
        """Return a line if there are classes without a sample."""
        names = self.fields[0].categories
        if names is None:
            return []
        counts = np.bincount(self.values, minlength=len(names))
        absent = [name for name, count in zip(names, counts, strict=True) if not count]
        if not absent:
            return []
        present = [name for name, count in zip(names, counts, strict=True) if count]
        return [
            f"{where} has {len(names):,} classes, and no sample of {first_few(absent)}: data.classes={_typed(present)} "
            "leaves classes without samples out"
        ]


def encoded(columns: Sequence[TargetColumn], fields: Sequence[Field], key: str, options: ColumnOptions) -> Encoded:
    """Return the targets of a part by their fields: classes are int64, numbers float32, or float64 if data.dtype is.

    Raises:
        RefusedError: a value is none of the classes, or no finite number.
    """
    if len(columns) != len(fields):
        raise RefusedError(
            f"names {len(columns)} columns, and the model was trained on {len(fields)}",
            key=key,
            suggestion="Choose as many columns.",
        )
    if fields[0].categories is not None:
        listed = "data.classes" if options.classes is not None else "the training part"
        return Encoded(fields, codes_of(fields[0], columns[0].values, columns[0].where, listed))
    read = [_numbers(column, one, options.dtype) for column, one in zip(columns, fields, strict=True)]
    return Encoded(fields, read[0] if len(read) == 1 else np.stack(read, 1))


def _numbers(column: TargetColumn, one: Field, dtype: str) -> NDArray[Any]:
    """Return targets that are numbers, in the type that a batch has. Raises: RefusedError."""
    values, where = column.values, column.where
    if one.kind == "date":
        found = dates(values, where, 1)
    elif isinstance(values, np.ndarray):
        if values.dtype.kind not in "biuf":
            raise RefusedError(
                f"holds {values.dtype}, but targets must be numbers",
                suggestion="Use data.target_type=class.",
                place=where,
            )
        found = values.astype(np.float64)
    elif (read := numbers_of(values)) is not None:
        found = read
    else:
        found, wrong = numbers_or_missing(values)
        wrong = wrong if wrong is not None else int(np.flatnonzero(np.isnan(found))[0])
        raise not_a_number(where, values[wrong], wrong + 1, use=_BY_CLASS)
    dtype = "float64" if dtype == "float64" else "float32"
    check_finite(found, where, dtype)
    if dtype == "float32" and found.ndim == 1 and loses_digits(found):
        row = int(np.abs(found - found.astype(np.float32)).argmax())
        raise RefusedError(
            f"holds {found[row]:.17g} in row {row + 1:,}, which float32 rounds to "
            f"{np.float32(found[row]):.17g}, an error that is not small relative to the standard deviation of the "
            "column",
            suggestion="Subtract a constant from it, or use data.dtype=float64.",
            place=where,
        )
    return found.astype(dtype)


def codes_of(field: Field, values: Values, where: str, listed: str) -> NDArray[np.int64]:
    """Return the codes of categories. `listed` is what has them, for the message.

    Raises:
        RefusedError: a value is none of the categories.
    """
    names = field.categories or ()
    are_numbers = field.numbered or names == tuple(map(str, range(len(names))))
    if are_numbers and isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        wrong = np.flatnonzero((values < 0) | (values >= len(names)))
        if len(wrong):
            raise _unknown(field, str(values[wrong[0]]), int(wrong[0]) + 1, where, listed)
        return values.astype(np.int64)
    place = {name: code for code, name in enumerate(map(str, range(len(names))) if field.numbered else names)}
    counts, row_of = names_of(values, where)
    unknown = next((name for name in counts if name not in place), None)
    if unknown is not None:
        raise _unknown(field, unknown, row_of(unknown), where, listed)
    if isinstance(values, np.ndarray):
        unique, inverse = np.unique(values, return_inverse=True)
        return np.array([place[name] for name in map(_name, unique)], np.int64)[inverse]
    return np.fromiter(map(place.__getitem__, values), np.int64, len(values))


def names_of(values: Values, where: str) -> tuple[Mapping[str, int], Any]:
    """Return how often each name occurs, in the order of first places, and a function from a name to its first row."""
    if not isinstance(values, np.ndarray):
        return Counter(values), lambda name: values.index(name) + 1
    if values.ndim != 1:
        raise RefusedError(
            f"has the shape {list(values.shape)}, but classes need one number or name for each sample", place=where
        )
    if values.dtype.kind == "f":
        check_finite(values, where)
        wrong = np.flatnonzero(values != np.floor(values))
        if len(wrong):
            raise RefusedError(
                f"holds {values[wrong[0]]:g} in row {wrong[0] + 1}, but a class must be a whole number",
                suggestion="Use data.target_type=number.",
                place=where,
            )
    unique, first, counts = np.unique(values, return_index=True, return_counts=True)
    names = list(map(_name, unique))
    order = np.argsort(first)
    rows = dict(zip(names, first.tolist(), strict=True))
    return {names[place]: int(counts[place]) for place in order}, lambda name: rows[name] + 1


def _name(value: Any) -> str:
    if isinstance(value, np.floating):
        return str(int(value))
    return value.decode() if isinstance(value, bytes) else str(value)


def check_finite(values: NDArray[Any], where: str, dtype: str = "float64", before: int = 0) -> None:
    """Check that numbers are finite, also as `dtype`; `before` samples come before these. Raises: RefusedError."""
    as_float = dtype if dtype in ("float32", "float64") else "float64"
    with np.errstate(over="ignore"):
        wrong = np.argwhere(~np.isfinite(values.astype(as_float, copy=False)))
    if not len(wrong):
        return
    value = values[tuple(wrong[0])]
    holds = f"holds {value} in row {before + wrong[0][0] + 1:,}"
    if np.isfinite(value):
        raise RefusedError(
            f"{holds}, which is too large for float32",
            suggestion="Correct it, or use data.dtype=float64.",
            place=where,
        )
    raise RefusedError(
        f"{holds}: a model cannot learn from that",
        suggestion="Leave the sample out or put a number there.",
        place=where,
    )


def _unknown(field: Field, name: str, row: int, where: str, listed: str) -> RefusedError:
    names = field.categories or ()
    if not name:
        return RefusedError(
            f"is empty in row {row:,}, where a class is needed",
            suggestion="Leave the row out, or correct it.",
            place=where,
        )
    holds = f"holds the class {name} in row {row:,}"
    if field.numbered:
        return RefusedError(
            f"{holds}, and the {len(names)} classes are 0 to {len(names) - 1}, which data.classes names",
            suggestion="Correct it, or list all classes there.",
            place=where,
        )
    return RefusedError(
        f"{holds}, which {listed} does not have (it has {first_few(names)})",
        suggestion="Make the classes the same.",
        place=where,
    )


def _typed(names: Sequence[str]) -> str:
    """Return classes as they are typed."""
    return f"[{','.join(names)}]" if len(names) <= 20 else "[...]"
