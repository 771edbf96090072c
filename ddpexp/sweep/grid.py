"""A table as strings, fitted to the width of the terminal."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ddpexp.system.terminal import within_patience

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.measure import Measurement
    from rich.table import Table

_LEAST = 8  # characters of a cell that is cut at its end: a job's directory begins with its number
_LEAST_PATH = 20  # characters of a cell that is cut at its start
_MIDDLE = 24  # characters of a cell that is cut in the middle
_PADDING = 3  # characters between columns
_NAMED = 4  # columns that are named as left out
_ANY_WIDTH = 10_000  # characters: more than any table has
_STYLES = {
    "running": "cyan", "done": "green", "failed": "red", "broken": "red", "killed": "red", "interrupted": "yellow",
    "stopped": "magenta", "submitted": "blue", "waiting": "dim",
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A column of strings."""

    name: str
    cells: Sequence[str]
    is_right: bool = False  # aligned to the right, as numbers are
    drop: float = math.inf  # a narrow terminal leaves out the column with the lowest number first; inf: never
    cut: Literal["start", "middle", "end"] | None = None  # where a narrow terminal may cut the cells


@dataclass(frozen=True)
class Grid:
    """A table as strings."""

    columns: Sequence[Column]
    best: int | None = None  # a line

    @property
    def header(self) -> list[str]:
        """Return the names of the columns."""
        return [column.name for column in self.columns]

    @property
    def lines(self) -> list[list[str]]:
        """Return the cells line by line."""
        return [list(line) for line in zip(*(column.cells for column in self.columns), strict=True)]


class Fitted:
    """A table for the terminal, with as many columns as fit."""

    def __init__(self, grid: Grid, again: str | None = None) -> None:
        """Keep the table; the width is known when it is drawn. `again` is the command that shows all columns."""
        self._grid, self._again = grid, again

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """First shorten names and long values, then leave out the least informative columns."""
        from rich.text import Text

        columns, room = list(self._grid.columns), options.max_width
        dropped: list[str] = []
        if _width(columns) > room:
            full_names = {column.drop: column.name for column in columns}
            columns = _shortened(columns)
            for column in sorted(columns, key=lambda column: column.drop):
                if column.drop < math.inf and _width(columns) > room:
                    columns.remove(column)
                    dropped.append(full_names[column.drop])
            columns = [_without_start(column, room - _width(columns) + _needed(column)) for column in columns]
        yield _table(columns, self._grid.best)
        if dropped and self._again is not None:
            names = dropped[::-1]  # what tells most apart first
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED + 1 else ""
            named = ", ".join(names[:_NAMED] if more else names)
            count = "a column has" if len(names) == 1 else f"{len(names)} columns have"
            yield Text(f"{count} no room here ({named}{more}); for all of them:\n{self._again}", style="dim")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the full width."""
        from rich.measure import Measurement

        return Measurement.get(console, options, _table(self._grid.columns, self._grid.best))


def _table(columns: Sequence[Column], best: int | None) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    cells = []
    for column in columns:
        table.add_column(
            Text(column.name), justify="right" if column.is_right else "left",
            no_wrap=column.cut not in ("start", "end"), overflow="ellipsis", min_width=4,
        )  # fmt: skip
        styles = _STYLES if column.name == "status" else {}
        cells.append([Text(cell, styles.get(cell, "")) for cell in column.cells])
    for number, line in enumerate(zip(*cells, strict=True)):
        table.add_row(*line, style="bold" if number == best else None)
    return table


def _width(columns: Sequence[Column]) -> int:
    """Return how many characters a table needs at least."""
    return sum(map(_needed, columns)) + _PADDING * (len(columns) - 1)


def _needed(column: Column) -> int:
    from rich.cells import cell_len

    if column.cut == "end":
        return _LEAST
    needed = max(map(cell_len, (column.name, *column.cells)))
    return min(needed, _LEAST_PATH) if column.cut == "start" else needed


def _shortened(columns: Sequence[Column]) -> list[Column]:
    """Shorten names to their last part if that distinguishes them, and cut the middle of long values."""
    short = [column.name.rpartition(".")[2] for column in columns]
    return [
        replace(
            column,
            name=last if short.count(last) == 1 else column.name,
            cells=[without_middle(cell, _MIDDLE) for cell in column.cells] if column.cut == "middle" else column.cells,
        )
        for column, last in zip(columns, short, strict=True)
    ]


def without_middle(text: str, limit: int) -> str:
    """Cut the middle of a long value: its end often distinguishes it from others."""
    return text if len(text) <= limit else f"{text[: limit // 2 - 1]}…{text[-(limit // 2) :]}"


def _without_start(column: Column, room: int) -> Column:
    """Keep only the ends of long paths, which distinguish them."""
    room = max(_LEAST_PATH, room)
    if column.cut != "start":
        return column
    return replace(column, cells=[text if len(text) <= room else f"…{text[1 - room :]}" for text in column.cells])


def limit() -> int | None:
    """Return how many rows the terminal can show; None for a pipe or a file."""
    return max(10, shutil.get_terminal_size().lines - 8) if sys.stdout.isatty() else None


def as_text(grid: Grid) -> str:
    """Return a table in full width as plain text: of ten thousand lines it takes a hundredth of the time of rich."""
    from rich.cells import cell_len

    columns = []
    for column in grid.columns:
        cells = [column.name, *column.cells]
        width = max(map(cell_len, cells))
        blanks = [" " * (width - cell_len(cell)) for cell in cells]
        columns.append([f"{b}{c}" if column.is_right else f"{c}{b}" for b, c in zip(blanks, cells, strict=True)])
    return "\n".join((" " * _PADDING).join(line).rstrip() for line in zip(*columns, strict=True))


def show(what: RenderableType, whole: bool = False) -> None:
    """Print; in a terminal fitted to its width unless `whole` is set, elsewhere in full width."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if whole or not console.is_terminal:
        console.width = _ANY_WIDTH
        console.width = max(1, console.measure(what).maximum)

    def write() -> None:
        with suppress(OSError, ValueError):  # the reader has closed the pipe
            console.print(what)

    within_patience(write)
