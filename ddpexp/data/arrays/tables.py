"""Reading the columns of a table: `.csv` with the standard library, `.parquet` with pyarrow."""

from __future__ import annotations

import csv
import importlib.util
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpexp.data.arrays.sources import Part, Source
from ddpexp.errors import RefusedError
from ddpexp.system.files import open_regular
from ddpexp.system.text import first_few

_DELIMITERS = ",;\t"
_LONGEST_FIELD = 1 << 24


@dataclass(frozen=True)
class Column:
    """A column as it was read: texts of a `.csv`, or an array."""

    name: str
    values: Sequence[str] | NDArray[Any]

    def numbers(self, source: object) -> NDArray[np.float64]:
        """Return the values as finite numbers.

        Raises:
            RefusedError: one is not.
        """
        try:
            numbers = np.asarray(self.values).astype(np.float64)
        except (ValueError, TypeError):
            row = next(row for row, value in enumerate(self.values) if not _is_number(value))
            raise RefusedError(
                f"{source}: column {self.name} {_described(self.values[row])} in row {row + 1:,}, which is no number: "
                "choose columns of numbers with data.inputs, or correct it."
            ) from None
        wrong = np.flatnonzero(~np.isfinite(numbers))
        if len(wrong):
            raise RefusedError(
                f"{source}: column {self.name} holds {numbers[wrong[0]]} in row {wrong[0] + 1:,}: a model "
                "cannot learn from that, so leave the row out or put a number there."
            )
        return numbers

    def best(self) -> NDArray[Any]:
        """Return the values as integers if all are, else as numbers if all are, else as texts."""
        values = np.asarray(self.values)
        if values.dtype.kind != "U":
            return values
        for dtype in (np.int64, np.float64):
            try:
                return values.astype(dtype)
            except (ValueError, OverflowError):
                pass
        return values


@dataclass(frozen=True)
class Table:
    """The chosen columns of a file."""

    num_rows: int
    inputs: Sequence[Column]
    targets: Sequence[Column]
    groups: Column | None


def read_table(part: Part, group_by: str | None, target_type: str) -> Table:
    """Read the columns that a part names.

    Raises:
        RefusedError: one is missing, or the file cannot be read as a table.
    """
    reader = _reader(part.source)
    names = reader.names
    counts = Counter(names)
    twice = next((name for name in names if counts[name] > 1), None)
    if twice is not None:
        raise RefusedError(f"{part.source} has two columns named {twice}: rename one.")
    chosen = (
        (f"{part.key}inputs", part.inputs or ()),
        (f"{part.key}targets", part.targets or ()),
        ("data.group_by", (group_by,) if group_by else ()),
    )
    for key, wanted in chosen:
        missing = next((name for name in wanted if name not in counts), None)
        if missing is not None:
            raise RefusedError(f"{key}={missing} is no column of {part.source}: it has {first_few(names, 10)}.")
    if not part.targets and target_type != "none":
        raise RefusedError(
            f"{part.key}targets is not set: name the column of {part.source} with the targets (it has "
            f"{first_few(names, 10)}), or use data.target_type=none if there are none."
        )
    targets = part.targets or ()
    of_targets = frozenset(targets)
    both = next((name for name in part.inputs or () if name in of_targets), None)
    if both is not None:
        raise RefusedError(f"{part.key}inputs and {part.key}targets both name {both}: a model would only copy it.")
    inputs = part.inputs or tuple(name for name in names if name not in of_targets and name != group_by)
    if not inputs:
        raise RefusedError(f"{part.source} has no columns beside the targets: there is nothing to learn from.")
    columns = reader.read([*inputs, *targets, *((group_by,) if group_by else ())])
    num_rows = len(columns[0].values)
    if num_rows == 0:
        raise RefusedError(f"{part.source} has no rows below its header.")
    count = len(inputs)
    groups = columns[-1] if group_by else None
    return Table(num_rows, columns[:count], columns[count : count + len(targets)], groups)


def columns_of(source: Source) -> list[str]:
    """Return the names of the columns of a table. Raises: RefusedError."""
    return _reader(source).names


def _reader(source: Source) -> _Csv | _Parquet:
    return _Csv(source) if source.kind == ".csv" else _Parquet(source)


class _Csv:
    """A text with a row of names first; values are separated by commas, semicolons or tabs."""

    def __init__(self, source: Source) -> None:
        self.source = source
        csv.field_size_limit(_LONGEST_FIELD)
        self.names: list[str] = next(self._rows(), [])
        if not any(self.names):
            raise RefusedError(f"{source} does not begin with a row of names: add one.")

    def read(self, names: Sequence[str]) -> list[Column]:
        place_of = {name: place for place, name in enumerate(self.names)}
        places = [place_of[name] for name in names]
        values: list[list[str]] = [[] for _ in names]
        rows = self._rows()
        next(rows)
        number = 0
        for row in rows:
            if not row:
                continue  # an empty line
            number += 1
            if len(row) != len(self.names):
                raise RefusedError(
                    f"{self.source}: row {number} has {len(row)} values, and there are {len(self.names)} columns: the "
                    "file may have been cut off, so write it again."
                )
            for place, column in zip(places, values, strict=True):
                column.append(row[place].strip())
        return [Column(name, column) for name, column in zip(names, values, strict=True)]

    def _rows(self) -> Any:
        try:
            with io.TextIOWrapper(open_regular(self.source.path), encoding="utf-8-sig", newline="") as file:
                header = file.readline()
                file.seek(0)
                delimiter = max(_DELIMITERS, key=header.count)
                yield from csv.reader(file, delimiter=delimiter)
        except UnicodeDecodeError as error:
            raise RefusedError(f"{self.source} is not text in UTF-8 (at byte {error.start:,}): convert it.") from None
        except csv.Error as error:
            raise RefusedError(f"{self.source} cannot be read as a table: {error}.") from None


class _Parquet:
    """A file of pyarrow's, or another tool's."""

    def __init__(self, source: Source) -> None:
        self.source = source
        if importlib.util.find_spec("pyarrow") is None:
            raise RefusedError(f"{source} needs pyarrow: pip install 'ddpexp[parquet]', or store it as .csv.")
        import pyarrow
        from pyarrow import parquet

        try:
            self.file = parquet.ParquetFile(source.path, memory_map=True)
        except (pyarrow.ArrowException, OSError) as error:
            raise RefusedError(f"{source} is damaged or no .parquet file: {_first_line(error)}") from None
        self.names = list(self.file.schema_arrow.names)

    def read(self, names: Sequence[str]) -> list[Column]:
        import pyarrow

        try:
            table = self.file.read(list(names), use_threads=False)
        except (pyarrow.ArrowException, OSError) as error:
            raise RefusedError(f"{self.source} is damaged: {_first_line(error)}") from None
        return [self._column(name, table.column(name)) for name in names]

    def _column(self, name: str, values: Any) -> Column:
        import pyarrow.types as types

        if values.null_count:
            row = values.is_null().to_pylist().index(True)
            raise RefusedError(
                f"{self.source}: column {name} has no value in row {row + 1:,}: a model cannot learn from that, so "
                "leave the row out or put a value there."
            )
        kind = values.type
        if types.is_dictionary(kind):
            values, kind = values.cast(kind.value_type), kind.value_type
        if types.is_string(kind) or types.is_large_string(kind):
            return Column(name, values.to_pylist())
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
            raise RefusedError(f"{self.source}: column {name} holds {kind}: choose columns of numbers or texts.")
        return Column(name, values.to_numpy())


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") + "."


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (ValueError, TypeError):
        return False
    return True


def _described(value: Any) -> str:
    text = str(value)
    return f"holds {text if not isinstance(value, str) else repr(text)}" if text else "is empty"
