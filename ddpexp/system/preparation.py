"""How far a preparation of data is: a bar on a terminal, otherwise a line every 10 seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ddpexp.system.terminal import print_message
from ddpexp.system.text import duration, size_text

_SHOWN_SECONDS = 1.0  # from the start, before which nothing is shown
_BAR_SECONDS, _LINE_SECONDS = 0.1, 10.0  # between two updates


@contextmanager
def preparation(total: int, title: str, unit: str) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with how many more units are done, of `total`; `unit` is their plural, or bytes."""
    done, began = 0, time.monotonic()
    bar: Any = None
    interval, shown_at = (_BAR_SECONDS, began + _SHOWN_SECONDS) if sys.stderr.isatty() else (_LINE_SECONDS, began)

    def advance(more: int) -> None:
        nonlocal bar, shown_at, done
        now, done = time.monotonic(), done + more
        if now - shown_at < interval or not 0 < done <= total:
            return
        shown_at = now
        left = duration((now - began) / done * (total - done))
        parts = f"{_amount(done, unit)} of {_amount(total, unit)}, about {left} left"
        if interval == _LINE_SECONDS:
            print_message(f"ddpexp: {title}: {parts}", sys.stdout)
            return
        with suppress(OSError, ValueError):  # the terminal is gone
            if bar is None:
                bar = _new_bar(total)
            bar.update(bar.task_ids[0], completed=done, description=f"{title}: {parts}")

    try:
        yield advance
    finally:
        if bar is not None:
            with suppress(OSError, ValueError):
                bar.stop()


def _amount(number: int, unit: str) -> str:
    return size_text(number) if unit == "bytes" else f"{number:,} {unit}"


def _new_bar(total: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = BarColumn(bar_width=30), TextColumn("{task.description}", markup=False)
    bar = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False)
    bar.start()
    bar.add_task("", total=total)
    return bar
