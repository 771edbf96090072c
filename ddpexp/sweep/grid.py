"""A table as strings, fitted to the width of the terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddpexp.system.terminal import within_patience

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.measure import Measurement
    from rich.table import Table

DIRECTORY = "directory"
"""The name of a column whose cells are cut to what is left; it is the last one."""

_LEAST = 8  # characters of a job's directory, which hold its number
_LEAST_PATH = 20  # of another directory, at its end
_SHORT = 24  # characters of a value that is shown beside others
_PADDING = 3  # characters between columns
_NAMED = 4  # columns that are named as left out
_ANY_WIDTH = 10_000  # characters: more than any table has
_STYLES = {
    "running": "cyan", "done": "green", "failed": "red", "broken": "red", "killed": "red", "interrupted": "yellow",
    "stopped": "magenta", "submitted": "blue", "waiting": "dim",
}  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """A table as strings."""

    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    right: Sequence[bool]  # columns of numbers
    best: int | None = None  # a line
    leaves: Sequence[int] = ()  # the columns that a narrow terminal may do without, the first one first
    values: int = 0  # the first columns, whose values may be cut
    has_paths: bool = False  # directories that their ends tell apart


class Fitted:
    """A table for the terminal, with as many columns as fit."""

    def __init__(self, grid: Grid, again: str | None = None) -> None:
        """Keep the table; the width is known when it is drawn. `again` is the command that shows all columns."""
        self._grid, self._again = grid, again

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """First shorten names and long values, then leave out the least informative columns."""
        from rich.text import Text

        grid, room = self._grid, options.max_width
        left: list[int] = []
        if sum(_widths(grid)) > room:
            grid = _shortened(grid)
            widths = _widths(grid)
            for place in grid.leaves:
                if sum(widths) > room:
                    left.append(place)
                    widths[place] = 0
            grid = _with_ends(_without(grid, left), room)
        yield _table(grid)
        if left and self._again is not None:
            names = [self._grid.header[place] for place in reversed(left)]  # what tells most apart first
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED + 1 else ""
            named = ", ".join(names[:_NAMED] if more else names)
            count = "a column has" if len(names) == 1 else f"{len(names)} columns have"
            yield Text(f"{count} no room here ({named}{more}); for all of them:\n{self._again}", style="dim")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the full width."""
        from rich.measure import Measurement

        return Measurement.get(console, options, _table(self._grid))


def _table(grid: Grid) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for name, right in zip(grid.header, grid.right, strict=True):
        gives_way = name == DIRECTORY
        table.add_column(
            Text(name), justify="right" if right else "left", no_wrap=not gives_way, overflow="ellipsis", min_width=4
        )
    status = grid.header.index("status") if "status" in grid.header else None
    for number, line in enumerate(grid.lines):
        cells = [Text(cell) for cell in line]
        if status is not None:
            cells[status].stylize(_STYLES.get(line[status], ""))
        table.add_row(*cells, style="bold" if number == grid.best else None)
    return table


def _widths(grid: Grid) -> list[int]:
    """Return how many characters the columns need, each with its distance to the next.

    Directories are cut to what is left.
    """
    from rich.cells import cell_len

    widths = []
    for place, column in enumerate(zip(grid.header, *grid.lines, strict=True)):
        needed = max(map(cell_len, column))
        if column[0] == DIRECTORY:
            needed = min(needed, _LEAST_PATH) if grid.has_paths else _LEAST
        widths.append(needed + (_PADDING if place < len(grid.header) - 1 else 0))
    return widths


def _shortened(grid: Grid) -> Grid:
    """Shorten keys to their last part if that distinguishes them, and cut the middle of long values."""
    short = [name.rpartition(".")[2] for name in grid.header]
    header = [last if short.count(last) == 1 else name for name, last in zip(grid.header, short, strict=True)]
    lines = [
        [*(without_middle(value, _SHORT) for value in line[: grid.values]), *line[grid.values :]] for line in grid.lines
    ]
    return replace(grid, header=header, lines=lines)


def without_middle(text: str, limit: int) -> str:
    """Cut the middle of a long value: its end often distinguishes it from others."""
    return text if len(text) <= limit else f"{text[: limit // 2 - 1]}…{text[-(limit // 2) :]}"


def _without(grid: Grid, places: Collection[int]) -> Grid:
    """Leave out columns."""

    def rest(line: Sequence[Any]) -> list[Any]:
        return [cell for place, cell in enumerate(line) if place not in places]

    return replace(grid, header=rest(grid.header), lines=[rest(line) for line in grid.lines], right=rest(grid.right))


def _with_ends(grid: Grid, room: int) -> Grid:
    """Keep only the ends of long paths in the last column, which distinguish them."""
    if not grid.has_paths or not grid.header or grid.header[-1] != DIRECTORY:
        return grid
    room = max(_LEAST_PATH, room - sum(_widths(grid)[:-1]))
    lines = [[*line[:-1], line[-1] if len(line[-1]) <= room else f"…{line[-1][1 - room :]}"] for line in grid.lines]
    return replace(grid, lines=lines)


def limit() -> int | None:
    """Return how many rows the terminal can show; None for a pipe or a file."""
    return max(10, shutil.get_terminal_size().lines - 8) if sys.stdout.isatty() else None


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
