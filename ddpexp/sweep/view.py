"""The display of a running sweep: a live table in a terminal, else a line per job; and the files at its end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ddpexp.sweep import table as tables
from ddpexp.sweep import table_files
from ddpexp.sweep.folder import SweepDir
from ddpexp.sweep.grid import limit, show
from ddpexp.sweep.rows import Goal, Reader
from ddpexp.system import files
from ddpexp.system.programs import python
from ddpexp.system.terminal import print_message

if TYPE_CHECKING:
    from rich.live import Live

_SECONDS = 1.0  # between two updates
_DRAWING_SECONDS = 60.0


class View:
    """Shows the progress of a sweep."""

    def __init__(self, folder: SweepDir, goal: Goal, draws: bool) -> None:
        """Check that standard output is a terminal; `draws`: there is to be a plot."""
        self._folder, self._goal, self._draws = folder, goal, draws
        self._reader = Reader(folder.path, goal.metric)
        self._live: Live | None = None
        self._shows = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._at = 0.0
        self._picture: subprocess.Popen[bytes] | None = None

    def look(self) -> None:
        """Update the display, if it is time to."""
        if self._shows and time.monotonic() - self._at >= _SECONDS:
            self._draw()
            self._at = time.monotonic()

    def ended(self, text: str) -> None:
        """Report that a job has ended, if there is no live table."""
        if not self._shows:
            print_message(text, sys.stdout)

    def last_begin(self) -> None:
        """Prepare for the plot: no more jobs are waiting."""
        if self._picture is None and self._draws:
            arguments = [str(self._folder.path), f"sweep.mode={self._goal.mode}"]
            arguments += [f"sweep.objective={self._goal.metric}"] if self._goal.metric is not None else []
            with suppress(OSError):  # no more processes: there is no picture then
                self._picture = subprocess.Popen(
                    python("ddpexp.sweep.picture:draw_later", arguments),
                    stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
                )  # fmt: skip

    def close(self) -> None:
        """Remove the live table; do not wait for the plot."""
        self._take_away()
        if self._picture is not None:
            self._picture.kill()
            self._picture.communicate()
            self._picture = None

    def finish(self) -> None:
        """Show the final table, and write it and the plot to the sweep's directory."""
        self._take_away()
        rows = self._reader.rows()
        again = f"python -m ddpexp table {files.typed(self._folder.path)} --all"
        show(tables.render(rows, self._goal, limit(), messages=0, again=again))  # what failed is listed below
        try:
            table_files.save(self._folder.path, rows, self._goal)
        except OSError as error:
            print_message(
                f"ddpexp: warning: {self._folder.path} cannot be written ({error.strerror}): the table is in no file"
            )
            return
        names = ["sweep.csv", "sweep.md", *(["sweep.png"] if self._drawn() else [])]
        print_message(f"written: {', '.join(names)} in {files.typed(self._folder.path)}", sys.stdout)

    def _drawn(self) -> bool:
        self.last_begin()
        if self._picture is None:
            return False
        process, self._picture = self._picture, None
        try:
            _, stderr = process.communicate(timeout=_DRAWING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            stderr = b"it takes too long"
        if process.returncode:
            lines = stderr.decode(errors="replace").strip().splitlines()
            print_message(
                f"ddpexp: sweep.png is left out: {lines[-1] if lines else f'drawing ended with {process.returncode}'}"
            )
        return process.returncode == 0

    def _draw(self) -> None:
        from rich.live import Live

        try:
            if self._live is None:
                # Without a refresh thread, which would make forks unsafe.
                self._live = Live(auto_refresh=False, redirect_stdout=False, redirect_stderr=False, transient=True)
                self._live.start()
            shown = tables.live(self._reader.rows(), self._goal, self._live.console.height)
            self._live.update(shown, refresh=True)
        except (OSError, ValueError):  # the reader has closed the pipe
            self._live, self._shows = None, False

    def _take_away(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with suppress(OSError, ValueError):
                live.stop()
