"""What a person sees of a run: lines, and on a terminal a progress bar below them."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Terminal:
    """Standard output of the command; on a TTY the last line is a live bar."""

    def __init__(self) -> None:
        """Look at whether standard output is a terminal."""
        # A dumb terminal cannot redraw a line; Open MPI gives rank zero a terminal whatever its own output is.
        self._live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and "OMPI_COMM_WORLD_RANK" not in os.environ
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def line(self, text: str) -> None:
        """Print one line, above the bar if there is one."""
        try:
            if self._bar is not None:
                self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, flush=True)
        except OSError:  # the reader has gone (`| head`, a closed terminal): the run goes on, its log has every line
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            self._live, self._bar = False, None

    def progress(self, message: dict[str, Any]) -> None:
        """Show progress: `done` of `total`, `text` beside the bar, `line` instead where there is no terminal."""
        if not self._live:
            self.line(message["line"])
            return
        if self._bar is None:
            self._bar, self._task = _new_bar(message["total"])
        assert self._task is not None
        self._bar.update(self._task, completed=message["done"], text=message["text"])
        if message["done"] >= message["total"]:
            self.close()  # what follows belongs below it

    def close(self) -> None:
        """Leave the bar as it stands and go on below it."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _new_bar(total: int) -> tuple[Progress, TaskID]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        TimeRemainingColumn(),
    )
    bar.start()
    return bar, bar.add_task("steps", total=total, text="")
