"""The encoding of a part of a table: inputs as an array of numbers, targets and groups as they were read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpexp.data.arrays.inputs import Reader, doubts, field_of, is_index
from ddpexp.data.arrays.sources import ColumnOptions, SplitFiles
from ddpexp.data.arrays.tables import Table, Values
from ddpexp.data.arrays.texts import loses_digits
from ddpexp.data.schema import Field, Schema
from ddpexp.errors import RefusedError
from ddpexp.system.text import first_few

_Column = tuple[Reader, Field, NDArray[Any]]


@dataclass(frozen=True)
class Columns:
    """Columns of inputs as numbers. Shapes: inputs (rows, features)."""

    fields: tuple[Field, ...]
    inputs: NDArray[Any]
    guesses: Sequence[str] = ()  # lines on what a person could doubt
    rounded: Sequence[str] = ()  # columns that float32 changes, for which all are stored as float64


@dataclass(frozen=True)
class Rows:
    """What was read of a part. Shapes: groups (rows,)."""

    inputs: Columns
    targets: Sequence[Values]
    groups: NDArray[np.int64] | None


@dataclass
class _Raw:
    """A column that is kept as it was read."""

    blocks: list[Values] = field(default_factory=list)

    def add(self, values: Values) -> None:
        self.blocks.append(values if isinstance(values, np.ndarray) else [value.strip() for value in values])

    def values(self) -> Values:
        if isinstance(self.blocks[0], np.ndarray):
            return np.concatenate(self.blocks)
        return [value for block in self.blocks for value in block]


def encode(
    part: SplitFiles, table: Table, options: ColumnOptions, schema: Schema | None, is_fixed: bool = False
) -> Rows:
    """Read a part by the schema, or decide the fields of the inputs; `is_fixed` by a trained run.

    Raises:
        RefusedError: its values do not fit.
    """
    fields = schema.inputs if schema is not None else _declared(part, table, options)
    readers = [
        Reader(one, f"{part.source}: column {name}", options.dtype, is_fixed)
        for one, name in zip(fields, table.inputs, strict=True)
    ]
    raw = [_Raw() for _ in range(len(table.targets) + (table.group_by is not None))]
    row = 1
    for block in table.blocks():
        for reader, values in zip(readers, block, strict=False):
            reader.add(values, row)
        for column, values in zip(raw, block[len(readers) :], strict=True):
            column.add(values)
        row += len(block[0])
    if row == 1:
        raise RefusedError("has no rows below its header", key=part.source.key, value=part.source.path)
    groups = raw.pop() if table.group_by is not None else None
    codes = np.unique(np.asarray(groups.values()), return_inverse=True)[1] if groups is not None else None
    columns = combined(readers, options.dtype, schema, may_have_index=part.inputs is None)
    return Rows(columns, [column.values() for column in raw], codes)


def combined(readers: Sequence[Reader], dtype: str, schema: Schema | None, may_have_index: bool) -> Columns:
    """Return columns that were read as one array; without a schema they decide its fields. Raises: RefusedError."""
    columns: Sequence[_Column] = [(reader, *reader.done("the training part")) for reader in readers]
    guesses, rounded = list[str](), list[str]()
    if schema is None:
        guesses = [line for reader in readers for line in reader.guesses]
        columns, more = _without_index(columns, may_have_index)
        guesses += more
    for reader, _, numbers in columns:
        _check(reader, numbers, dtype)
    if dtype == "float32" and schema is None:
        rounded = [str(one.name) for _, one, numbers in columns if numbers.ndim == 1 and loses_digits(numbers)]
    stored = dtype if schema is None else schema.stored
    if rounded:
        stored = "float64"
    inputs = _joined([numbers for _, _, numbers in columns], str(stored))
    return Columns(tuple(one for _, one, _ in columns), inputs, guesses, rounded)


def _declared(part: SplitFiles, table: Table, options: ColumnOptions) -> tuple[Field, ...]:
    """Return the fields of the inputs as the options declare them; a column that is not declared holds numbers."""
    names = frozenset(table.reader.names)
    for key, listed in (("data.columns", options.columns), ("data.missing", options.missing)):
        if (unknown := next((name for name in listed if name not in names), None)) is not None:
            raise RefusedError(
                f"names {unknown}, but {part.source} has no such column: it has {first_few(table.reader.names, 10)}",
                key=key,
            )
    if (
        both := next((name for name in options.dropped if name in (*(part.inputs or ()), *table.targets)), None)
    ) is not None:
        raise RefusedError(
            "leaves out a column that data.inputs or data.targets names",
            key=f"data.columns.{both}",
            value="drop",
            suggestion="Remove the column from one of the two keys.",
        )
    if (wrong := next((name for name in options.missing if name not in table.inputs), None)) is not None:
        raise RefusedError(
            f"names {wrong}, but this column is not an input: missing targets are not filled, since a model would "
            "learn the filled values",
            key="data.missing",
            suggestion="Leave the rows out.",
        )
    fields = []
    for name in table.inputs:
        kind = options.columns.get(name) or ("date" if name in table.reader.dates else "number")
        assert kind != "drop", "no input is left out"
        fields.append(field_of(name, kind, options.missing, options.dtype))
    return tuple(fields)


def _without_index(columns: Sequence[_Column], may_have_index: bool) -> tuple[Sequence[_Column], list[str]]:
    """Return the columns without an index of pandas, and a line for each that a person could doubt."""
    kept, guesses = list[_Column](), list[str]()
    for reader, one, numbers in columns:
        if may_have_index and is_index(one, numbers):
            guesses.append(
                f"{reader.where} is an index without a name, and no input: data.inputs=[...] lists the inputs"
            )
            continue
        guesses += doubts(one, numbers, reader.where)
        kept.append((reader, one, numbers))
    return (kept, guesses) if kept else (columns, [])


def _check(reader: Reader, numbers: NDArray[Any], dtype: str) -> None:
    """Check that numbers fit into the type that batches have. Raises: RefusedError."""
    if numbers.dtype.kind != "f":
        return
    if dtype == "int64":
        wrong = numbers != np.floor(numbers)
        problem, advice = "which data.dtype=int64 would cut off", "Use data.dtype=float32."
    else:
        with np.errstate(over="ignore"):
            wrong = np.isinf(numbers.astype(dtype))
        problem, advice = f"which is too large for data.dtype={dtype}", "Correct it, or use data.dtype=float64."
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise RefusedError(
            f"holds {numbers[row]:g} in row {row + 1:,}, {problem}", suggestion=advice, place=reader.where
        )


def _joined(columns: Sequence[NDArray[Any]], dtype: str) -> NDArray[Any]:
    """Return columns beside one another. Shapes: (rows,) or (rows, categories) each; (rows, features)."""
    widths = [1 if column.ndim == 1 else column.shape[1] for column in columns]
    inputs = np.empty((len(columns[0]), sum(widths)), dtype)
    begin = 0
    for column, width in zip(columns, widths, strict=True):
        inputs[:, begin : begin + width] = column.reshape(len(column), width)
        begin += width
    return inputs
