"""Rows and arrays for a trained model, encoded as those of data=arrays are."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddpexp.data.arrays.dataset import Rows, form_of
from ddpexp.data.arrays.encode import encode
from ddpexp.data.arrays.prepare import options_of
from ddpexp.data.arrays.sources import TABLES, SplitFiles
from ddpexp.data.arrays.store import MAPPED
from ddpexp.data.arrays.tables import Table, TableReader, Values, reader_of
from ddpexp.data.arrays.targets import check_finite
from ddpexp.data.base import SampleNames
from ddpexp.data.inputs import INPUT, Inputs, array_of, as_path, listed, load_array, schema_of, wrong_kind
from ddpexp.data.named_files import Source, source_of
from ddpexp.data.schema import Schema
from ddpexp.errors import RefusedError
from ddpexp.system.text import first_few

_ID = re.compile(r"(?i)id|index||unnamed: 0|__index_level_\d+__")  # columns that name rows, the latter of pandas
_ROWS = "a row as a mapping of columns to values, a list of such, a DataFrame, or a .csv or .parquet file"


def read(given: Any, known: Mapping[str, Any], /, **options: Any) -> Inputs:
    """Return rows or arrays as samples, with placeholders for their targets. Raises: RefusedError."""
    schema = schema_of(known)
    if schema.inputs[0].name is None:
        array, is_one = _array(given, schema, options)
        return inputs_of(array, schema, None, is_one)
    return read_rows(given, schema, options)


def inputs_of(
    array: NDArray[Any], schema: Schema, names: SampleNames | None, is_one: bool, divisor: float | None = None
) -> Inputs:
    """Return stored inputs as samples. Shapes: (samples, ...)."""
    targets = None
    if schema.targets:
        targets = torch.full((len(array),), float("nan") if schema.classes is None else -1)
    return Inputs(Rows(torch.from_numpy(array), targets, form_of(schema, divisor), schema=schema), names, is_one)


def read_rows(given: Any, schema: Schema, options: Mapping[str, Any]) -> Inputs:
    """Return rows of a table as samples. Raises: RefusedError."""
    part, reader, is_one = _opened(given, options.get("delimiter"))
    wanted = tuple(str(one.name) for one in schema.inputs)
    if missing := [name for name in wanted if name not in reader.names]:
        raise RefusedError(
            f"has no column {first_few(missing, 10)}, which the model was trained on",
            place=part.source,
            suggestion=f"Give it; there is {first_few(list(reader.names), 10)}.",
        )
    kinds = {key: options[key] for key in ("dtype", "columns", "missing", "delimiter") if key in options}
    rows = encode(part, Table(reader, wanted, (), None), options_of("none", **kinds), schema, is_fixed=True)
    named = next((name for name in reader.names if _ID.fullmatch(name) and name not in wanted), None)
    names = None if named is None else _names(named, reader)
    return inputs_of(rows.inputs.inputs, schema, names, is_one)


def texts_in(given: Any, column: str) -> tuple[list[str], SampleNames | None, bool] | None:
    """Return the texts of a column of rows, their names, and whether it is one row; None if there are no rows."""
    if not is_rows(given):
        return None
    _, reader, is_one = _opened(given, None)
    if column not in reader.names:
        reason = f"has no column {column}, the texts that the model was trained on"
        raise RefusedError(reason, place=INPUT, suggestion=f"It has {first_few(list(reader.names), 10)}.")
    texts = [str(text) for block in reader.blocks([column]) for text in block[0]]
    named = next((name for name in reader.names if _ID.fullmatch(name) and name != column), None)
    return texts, None if named is None else _names(named, reader), is_one


def is_rows(given: Any) -> bool:
    """Return whether rows are given: mappings, a frame, or the file of a table."""
    first = listed(given)[0]
    if isinstance(given, str | Path):
        return Path(given).suffix.lower() in TABLES
    return _is_frame(given) or (len(first) > 0 and isinstance(_mapping(first[0]), Mapping))


@dataclass(frozen=True)
class _Given:
    """Rows in memory, as a table is read."""

    columns: Mapping[str, Values]
    guesses: list[str] = field(default_factory=list)
    dates: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        return list(self.columns)

    def blocks(self, names: Sequence[str]) -> Sequence[Sequence[Values]]:
        return [[self.columns[name] for name in names]]


def _opened(given: Any, delimiter: str | None) -> tuple[SplitFiles, TableReader, bool]:
    """Return what messages call the rows, and the rows. Raises: RefusedError."""
    in_memory = SplitFiles("eval", Source("input", "rows", 0, 0), None, None, None)
    if _is_frame(given):
        columns = {str(name): _values(given[name].tolist()) for name in given.columns}
        if not _counts(given.index.tolist()):
            columns = {str(given.index.name or "index"): _values(given.index.tolist()), **columns}
        return in_memory, _Given(columns), False
    if (path := as_path(given)) is not None:
        if path.suffix.lower() not in TABLES:
            raise wrong_kind(given, _ROWS)
        source = source_of("input", str(path))
        return SplitFiles("eval", source, None, None, None), reader_of(source, delimiter), False
    values, is_one = listed(given)
    rows = [_mapping(value) for value in values]
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        wrong = next((value for value, row in zip(values, rows, strict=True) if not isinstance(row, Mapping)), given)
        raise wrong_kind(wrong, _ROWS)
    names = [str(name) for name in rows[0]]
    for number, row in enumerate(rows):
        if lost := [name for name in names if name not in row]:
            raise RefusedError(f"has no column {lost[0]}, which row 0 has", place=f"row {number}")
    return in_memory, _Given({name: _values([row[name] for row in rows]) for name in names}), is_one


def _is_frame(given: Any) -> bool:
    return hasattr(given, "columns") and hasattr(given, "iloc")


def _mapping(value: Any) -> Any:
    """Return a row of pandas as a mapping; all else as it is."""
    return value.to_dict() if hasattr(value, "to_dict") and hasattr(value, "iloc") else value


def _counts(index: Sequence[Any]) -> bool:
    return index == list(range(len(index)))


def _values(values: Sequence[Any]) -> Values:
    """Return a column as a file of a table would hold it: numbers, dates or texts; a missing value is NaN or empty."""
    plain = [None if value is None or value != value else value for value in values]
    there = [value for value in plain if value is not None]
    if there and all(isinstance(value, date | np.datetime64) for value in there):
        return np.array([np.datetime64("NaT") if value is None else value for value in plain], "datetime64[us]")
    if all(isinstance(value, Real | np.bool_) for value in there):
        return np.array([math.nan if value is None else value for value in plain])
    return ["" if value is None else str(value) for value in plain]


def _names(column: str, reader: TableReader) -> SampleNames:
    values = [value for block in reader.blocks([column]) for value in np.asarray(block[0]).tolist()]
    return SampleNames(column if re.fullmatch("(?i)id|index", column) else "index", values)


def _array(given: Any, schema: Schema, options: Mapping[str, Any]) -> tuple[NDArray[Any], bool]:
    """Return arrays as they are stored, and whether it is one sample by itself. Raises: RefusedError."""
    member = options.get("inputs")
    if (path := as_path(given)) is not None:
        if path.suffix.lower() not in (".npy", ".npz"):
            raise wrong_kind(given, "a .npy or .npz file, or an array")
        array = load_array(path, member if isinstance(member, str) else None)
    else:
        try:
            array = np.asarray(given) if (known := array_of(given)) is None else known
            if array.dtype == object:
                array = np.stack([np.asarray(array_of(value)) for value in listed(given)[0]])
        except (ValueError, TypeError):
            raise wrong_kind(given, f"arrays of shape {list(schema.shape)}") from None
    is_one = array.shape == schema.shape
    array = array[None] if is_one else array
    if array.dtype.kind not in "biuf" or array.shape[1:] != schema.shape or not len(array):
        raise RefusedError(
            f"is {array.dtype} of shape {list(array.shape)}, and a sample of the model has the shape "
            f"{list(schema.shape)}",
            place=str(given) if path is not None else "the input",
            suggestion="Give an array of numbers of that shape, or several along a first dimension.",
        )
    if array.dtype.kind == "f":
        check_finite(array, str(path or "the input"), schema.dtype)
    if array.dtype.str not in MAPPED or not array.flags.c_contiguous or not array.flags.writeable:
        wide = "float64" if array.dtype.kind == "f" and array.itemsize >= 8 else schema.dtype
        array = np.array(array, array.dtype if array.dtype.str in MAPPED else wide)
    return array, is_one
