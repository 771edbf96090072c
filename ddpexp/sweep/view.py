"""The display of a running sweep: a live table in a terminal, else a line per job; and the files at its end."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ddpexp.sweep import table as tables
from ddpexp.sweep import table_files
from ddpexp.sweep.comparison import by_best
from ddpexp.sweep.drawing import Drawing
from ddpexp.sweep.folder import SweepDir
from ddpexp.sweep.grid import limit, show
from ddpexp.sweep.record import Goal
from ddpexp.sweep.rows import RowReader
from ddpexp.system import files
from ddpexp.system.terminal import print_message

if TYPE_CHECKING:
    from rich.live import Live

_UPDATE_SECONDS = 1.0
_NICENESS = 10  # of drawing, beside the last jobs


class View:
    """Shows the progress of a sweep."""

    def __init__(self, folder: SweepDir, goal: Goal, draws: bool) -> None:
        """Check that standard output is a terminal; `draws`: there is to be a plot."""
        self._folder = folder
        self._goal = goal
        self._draws = draws
        self._reader = RowReader(folder.path, goal.metric)
        self._live: Live | None = None
        self._is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._updated = 0.0
        self._drawing: Drawing | None = None

    def update(self) -> None:
        """Update the display, if it is time to."""
        if self._is_terminal and time.monotonic() - self._updated >= _UPDATE_SECONDS:
            self._draw_table()
            self._updated = time.monotonic()

    def ended(self, text: str) -> None:
        """Report that a job has ended, if there is no live table."""
        if not self._is_terminal:
            print_message(text, sys.stdout)

    def prepare_plot(self) -> None:
        """Start the process that will draw the plot, if there is to be one; called when no more jobs are waiting."""
        if self._drawing is None and self._draws:
            self._drawing = Drawing([self._folder.path], self._goal, self._folder.path, _NICENESS)

    def close(self) -> None:
        """Remove the live table; do not wait for the plot."""
        self._remove_table()
        if self._drawing is not None:
            self._drawing.close()

    def finish(self) -> None:
        """Show the final table, and write it and the plot to the sweep's directory."""
        self._remove_table()
        rows, goal = by_best(self._reader.rows(), self._goal)
        again = f"python -m ddpexp table {files.typed(self._folder.path)} --all"
        show(tables.render(rows, goal, limit(), messages=0, again=again))  # what failed is listed below
        self.prepare_plot()
        table_files.save(self._folder.path, rows, goal, self._drawing)

    def _draw_table(self) -> None:
        from rich.live import Live

        try:
            if self._live is None:
                # Without a refresh thread, which would make forks unsafe.
                self._live = Live(auto_refresh=False, redirect_stdout=False, redirect_stderr=False, transient=True)
                self._live.start()
            shown = tables.live(*by_best(self._reader.rows(), self._goal), self._live.console.height)
            self._live.update(shown, refresh=True)
        except (OSError, ValueError):  # the reader has closed the pipe
            self._live, self._is_terminal = None, False

    def _remove_table(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with suppress(OSError, ValueError):
                live.stop()
