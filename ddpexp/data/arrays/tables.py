"""Reading the columns of a table, block by block: `.csv` with the standard library, `.parquet` with pyarrow."""

from __future__ import annotations

import csv
import importlib.util
import io
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ddpexp.data.arrays.sources import Names, SplitFiles
from ddpexp.data.named_files import Source
from ddpexp.errors import RefusedError
from ddpexp.system.files import open_regular
from ddpexp.system.text import first_few

Values = Sequence[str] | NDArray[Any]

_DELIMITERS = ",;\t"
_LONGEST_FIELD = 1 << 24
_BLOCK = 1 << 18  # values that are read at a time


class TableReader(Protocol):
    """The columns of a table."""

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the columns, in their order."""
        ...

    @property
    def dates(self) -> frozenset[str]:
        """Return the names of those that are stored as dates."""
        ...

    @property
    def guesses(self) -> Sequence[str]:
        """Return a line for each guess that a person could doubt."""
        ...

    def blocks(self, names: Sequence[str]) -> Iterable[Sequence[Values]]:
        """Return the values of some columns, rows after rows. Raises: RefusedError."""
        ...


@dataclass(frozen=True)
class Table:
    """The chosen columns of a file."""

    reader: TableReader
    inputs: Names
    targets: Names
    group_by: str | None

    def blocks(self) -> Iterable[Sequence[Values]]:
        """Return the values of inputs, targets and groups, rows after rows. Raises: RefusedError."""
        groups = (self.group_by,) if self.group_by is not None else ()
        return self.reader.blocks([*self.inputs, *self.targets, *groups])


def open_table(
    part: SplitFiles, group_by: str | None, target_type: str, dropped: Collection[str], delimiter: str | None
) -> Table:
    """Choose the columns that a part names; all but the targets, groups and `dropped` are inputs by default.

    Raises:
        RefusedError: one is missing, or the file cannot be read as a table.
    """
    reader = reader_of(part.source, delimiter)
    names = reader.names
    counts = Counter(names)
    twice = next((name for name in names if counts[name] > 1), None)
    if twice is not None:
        raise RefusedError(
            f"has two columns named {twice}", suggestion="Rename one.", key=part.source.key, value=part.source.path
        )
    chosen = (
        (f"{part.key}inputs", part.inputs or ()),
        (f"{part.key}targets", part.targets or ()),
        ("data.group_by", (group_by,) if group_by else ()),
    )
    for key, wanted in chosen:
        missing = next((name for name in wanted if name not in counts), None)
        if missing is not None:
            raise RefusedError(
                f"is not a column of {part.source}: it has {first_few(names, 10)}", key=key, value=missing
            )
    if not part.targets and target_type != "none":
        raise RefusedError(
            "is not set",
            key=f"{part.key}targets",
            suggestion=f"Name the column of {part.source} with the targets (it has {first_few(names, 10)}), "
            "or use data.target_type=none for data without targets.",
        )
    targets = part.targets or ()
    of_targets = frozenset(targets)
    both = next((name for name in part.inputs or () if name in of_targets), None)
    if both is not None:
        raise RefusedError(
            f"and {part.key}targets both name {both}: a model would only copy that column", key=f"{part.key}inputs"
        )
    unused = of_targets | frozenset(dropped) | {group_by}
    inputs = part.inputs or tuple(name for name in names if name not in unused)
    if not inputs:
        raise RefusedError(
            "has no columns beside the targets: there is nothing to learn from",
            key=part.source.key,
            value=part.source.path,
        )
    return Table(reader, inputs, targets, group_by)


def reader_of(source: Source, delimiter: str | None = None) -> _Csv | _Parquet:
    """Open a table, of which the names of the columns are read. Raises: RefusedError."""
    return _Csv(source, delimiter) if source.kind == ".csv" else _Parquet(source)


class _Csv:
    """A text with a row of names first; values are separated by commas, semicolons or tabs, or by `delimiter`."""

    def __init__(self, source: Source, delimiter: str | None) -> None:
        self.source = source
        self.dates = frozenset[str]()
        self.guesses = list[str]()
        csv.field_size_limit(_LONGEST_FIELD)
        self.delimiter = delimiter or self._guessed()
        self.names: list[str] = next(self._rows(), [])
        if not any(self.names):
            raise RefusedError(
                "does not begin with a row of column names",
                suggestion="Add such a row.",
                key=source.key,
                value=source.path,
            )

    def blocks(self, names: Sequence[str]) -> Iterator[Sequence[Values]]:
        place_of = {name: place for place, name in enumerate(self.names)}
        places = [place_of[name] for name in names]
        rows = self._rows()
        first = 1
        next(rows)
        while lines := list(islice(rows, max(1, _BLOCK // len(self.names)))):
            lines = list(filter(None, lines))  # without empty lines
            if set(map(len, lines)) - {len(self.names)}:
                self._refuse_uneven(lines, first)
            if lines:
                columns = list(zip(*lines, strict=True))
                yield [columns[place] for place in places]
            first += len(lines)

    def _refuse_uneven(self, lines: Sequence[Sequence[str]], first: int) -> None:
        row, count = next((row, len(line)) for row, line in enumerate(lines, first) if len(line) != len(self.names))
        raise RefusedError(
            f"Row {row} has {count} values, but the header has {len(self.names)} columns: the file may be cut off",
            suggestion="Write the file again.",
            key=self.source.key,
            value=self.source.path,
        )

    def _guessed(self) -> str:
        with self._opened() as file:
            header = file.readline()
        counts = sorted(((header.count(one), one) for one in _DELIMITERS), key=lambda found: -found[0])
        if counts[1][0]:
            self.guesses.append(
                f"{self.source}: the first line has {counts[0][0]} {_spoken(counts[0][1])}, which separate values, "
                f"and {counts[1][0]} {_spoken(counts[1][1])}: data.delimiter names another separator"
            )
        return counts[0][1]

    def _rows(self) -> Iterator[list[str]]:
        with self._opened() as file:
            yield from csv.reader(file, delimiter=self.delimiter)

    @contextmanager
    def _opened(self) -> Iterator[io.TextIOWrapper]:
        try:
            with io.TextIOWrapper(open_regular(self.source.path), encoding="utf-8-sig", newline="") as file:
                yield file
        except UnicodeDecodeError as error:
            raise RefusedError(
                f"is not text in UTF-8 (at byte {error.start:,})",
                suggestion="Convert it to UTF-8.",
                key=self.source.key,
                value=self.source.path,
            ) from None
        except csv.Error as error:
            raise RefusedError(
                f"cannot be read as a table: {error}", key=self.source.key, value=self.source.path
            ) from None


class _Parquet:
    """A file of pyarrow's, or another tool's."""

    def __init__(self, source: Source) -> None:
        self.source, self.guesses = source, list[str]()
        if importlib.util.find_spec("pyarrow") is None:
            raise RefusedError(
                "needs pyarrow",
                suggestion="Install it: pip install 'ddpexp[parquet]', or store it as .csv.",
                key=source.key,
                value=source.path,
            )
        import pyarrow
        from pyarrow import parquet

        try:
            self.file = parquet.ParquetFile(source.path, memory_map=True)
        except (pyarrow.ArrowException, OSError) as error:
            raise RefusedError(
                f"is damaged or is not a .parquet file: {_first_line(error)}", key=source.key, value=source.path
            ) from None
        kinds = {one.name: one.type for one in self.file.schema_arrow}
        self.names: list[str] = list(self.file.schema_arrow.names)
        self.dates = frozenset(name for name, kind in kinds.items() if _is_date(kind))

    def blocks(self, names: Sequence[str]) -> Iterator[Sequence[Values]]:
        import pyarrow

        try:
            table = self.file.read(list(names), use_threads=False)
        except (pyarrow.ArrowException, OSError) as error:
            raise RefusedError(
                f"is damaged: {_first_line(error)}", key=self.source.key, value=self.source.path
            ) from None
        if table.num_rows:
            yield [self._values(name, table.column(name)) for name in names]

    def _values(self, name: str, values: Any) -> Values:
        import pyarrow.types as types

        kind = values.type
        if types.is_dictionary(kind):
            values, kind = values.cast(kind.value_type), kind.value_type
        if types.is_string(kind) or types.is_large_string(kind):
            return ["" if value is None else value for value in values.to_pylist()]
        if _is_date(kind):
            return np.asarray(values.to_numpy()).astype("datetime64[us]")
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
            raise RefusedError(
                f"Column {name} holds {kind}",
                suggestion="Choose columns of numbers or texts.",
                key=self.source.key,
                value=self.source.path,
            )
        if values.null_count and types.is_boolean(kind):
            values = values.cast("int8")
        return np.asarray(values.to_numpy())


def _is_date(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_date(kind) or types.is_timestamp(kind))


def _spoken(delimiter: str) -> str:
    return "tabs" if delimiter == "\t" else f"'{delimiter}'"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") + "."
