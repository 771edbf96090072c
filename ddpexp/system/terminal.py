"""Console output of a command: lines, and on a TTY a progress bar below them."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from ddpexp.system import caller
from ddpexp.system.secrets import masked_tree
from ddpexp.system.text import line_of_output, sanitize

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_QUEUE = 10_000  # lines queued for a slow terminal; far more than anybody scrolls back
_WAIT_SECONDS = 1.0  # how long to wait for a slow terminal before lines are dropped
_MOMENT_SECONDS = 0.5  # an activity that takes no longer is not shown
_PATIENCE_SECONDS = 2.0  # how long to wait for queued lines at the end
_LEFT_OUT = "... {count:,} lines omitted because nobody read them; the run's log has all of them ..."


class Terminal:
    """Standard output of the command; on a TTY the last line is a live progress bar.

    A separate thread writes: a blocked terminal (Ctrl-S, a full pipe that nobody reads) must not block the supervisor.
    """

    def __init__(self) -> None:
        """Detect whether standard output is a terminal."""
        self._screen = _Screen()
        self._waiting: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._left_out = 0
        self._closing = self._paused = False
        self._shown = self._shown_before = 0  # entries taken by the thread, now and when it was last waited for
        self._budget, self._waited_at = _WAIT_SECONDS, time.monotonic()

    def line(self, text: str) -> None:
        """Print one line, above the bar if there is one; returns immediately."""
        self._put(lambda: self._screen.line(text))

    def progress(self, message: dict[str, Any]) -> None:
        """Show progress: `done` of `total` with `text` beside the bar; without a terminal, print `line` instead."""
        if not self._paused or not self._screen.is_live:
            self._put(lambda: self._screen.progress(message))

    def activity(self, text: str, done: int, total: int) -> None:
        """Show below the bar what is done between two steps, until all of it is done."""
        if not self._paused:
            self._put(lambda: self._screen.activity(text, done, total))

    def pause(self) -> None:
        """Write queued lines, end the bar, and keep later lines until `resume`: somebody else uses the terminal."""
        written = threading.Event()

        def end_bar() -> None:
            self._screen.close()
            written.set()

        self._put(end_bar)
        written.wait(_PATIENCE_SECONDS)
        self._paused = True

    def resume(self) -> None:
        """Write what was kept."""
        if not self._paused:
            return
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def close(self) -> None:
        """Write queued lines, waiting briefly at most; the bar stays as it is and later output follows below it."""
        with self._changed:
            self._closing = True
            if self._waiting:
                self._start()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_PATIENCE_SECONDS)
        elif self._waiting:
            self._show()

    def _put(self, show: Callable[[], None]) -> None:
        with self._changed:
            if self._closing:
                return
            self._start()
            if len(self._waiting) >= _QUEUE:
                self._make_room()
            self._waiting.append(show)
            self._changed.notify_all()

    def _make_room(self) -> None:
        """Wait for a slow terminal; drop the oldest line if nothing is being read."""
        now = time.monotonic()
        if self._shown != self._shown_before:  # it makes progress: spend up to half of the time waiting for it
            self._budget = min(_WAIT_SECONDS, self._budget + (now - self._waited_at) / 2)
        self._shown_before, self._waited_at = self._shown, now
        if self._budget > 0:
            self._changed.wait_for(lambda: len(self._waiting) <= _QUEUE // 2, self._budget)
            self._budget -= time.monotonic() - now
        if len(self._waiting) >= _QUEUE:
            self._waiting.popleft()
            self._left_out += 1

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._show, daemon=True, name="terminal")
            with suppress(RuntimeError):  # thread limit reached: retried with the next line, or at the end
                thread.start()
                self._thread = thread

    def _show(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: (self._waiting and not self._paused) or self._closing)
                left_out, self._left_out = self._left_out, 0
                show = self._waiting.popleft() if self._waiting else None
                self._shown += 1
                if len(self._waiting) == _QUEUE // 2:
                    self._changed.notify_all()
            if left_out:
                self._screen.line(_LEFT_OUT.format(count=left_out))
            if show is None:
                self._screen.close()
                return
            show()


class _Screen:
    """The output that the thread writes to."""

    def __init__(self) -> None:
        # A dumb terminal cannot redraw a line; Open MPI gives rank zero a TTY regardless of mpirun's own output.
        self.is_live = (
            sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and "OMPI_COMM_WORLD_RANK" not in os.environ
        )
        self._bar: Progress | None = None
        self._steps: TaskID | None = None  # None: no step is recorded yet, or the last one is
        self._activity: TaskID | None = None
        self._named = ""  # the activity
        self._for_caller = caller.is_live()

    def line(self, text: str) -> None:
        text = line_of_output(text)
        try:
            if self._bar is not None:
                self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, flush=True)
        except (OSError, ValueError):
            # The reader is gone (`| head`, a closed terminal): the run continues, and its log has every line.
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            self.is_live, self._bar = False, None

    def progress(self, message: dict[str, Any]) -> None:
        done, total, text = message["done"], message["total"], message["text"]
        if self._for_caller and caller.report(caller.ProgressLine(done, total, text)):
            return
        if not self.is_live:
            self.line(message["line"])
            return
        try:
            self._bar = self._bar or _new_bar()
            if self._steps is None:
                self._steps = self._bar.add_task("steps", total=total, text="")
            self._end_activity(self._bar)
            self._bar.update(self._steps, completed=done, text=text)
        except (OSError, ValueError):
            self.is_live, self._bar = False, None
        if done >= total:
            self.close()  # later lines are printed below it

    def activity(self, text: str, done: int, total: int) -> None:
        if not self.is_live or self._for_caller:
            return
        try:
            self._bar = self._bar or _new_bar()
            if text != self._named:
                self._end_activity(self._bar)
            if self._activity is None:
                self._activity, self._named = self._bar.add_task("activity", total=total or None, text=text), text
            self._bar.update(self._activity, completed=done)
            if total and done >= total:
                self._end_activity(self._bar)
        except (OSError, ValueError):
            self.is_live, self._bar = False, None
        if self._activity is None and self._steps is None:
            self.close()

    def _end_activity(self, bar: Progress) -> None:
        if self._activity is not None:
            bar.remove_task(self._activity)
            self._activity = None

    def close(self) -> None:
        if self._bar is not None:
            with suppress(OSError, ValueError):
                self._bar.stop()
            self._bar = self._steps = self._activity = None


def print_message(text: str, to: TextIO | None = None) -> None:
    """Print a message of the command itself, by default on standard error; an output error never ends the run.

    The text may contain untrusted parts: secrets are masked, control characters are shown as text.
    """
    shown = sanitize(text)

    def write() -> None:
        with suppress(OSError, ValueError):
            print(shown, file=to or sys.stderr, flush=True)

    within_patience(write)


def show(text: str) -> None:
    """Print a result on standard output, at the reader's pace; a reader that goes away (`| head`) is no error."""
    with suppress(OSError, ValueError):
        print(sanitize(text), flush=True)


def print_json(value: Mapping[str, Any]) -> None:
    """Print a result for programs: one JSON object on standard output, with secrets masked."""
    with suppress(OSError, ValueError):
        print(json.dumps(masked_tree(value), indent=2), flush=True)


def within_patience(work: Callable[[], None]) -> None:
    """Run `work`, which a terminal may block, in a thread, and stop waiting for it after a moment."""
    thread = threading.Thread(target=work, daemon=True, name="terminal-message")
    try:
        thread.start()
    except RuntimeError:  # thread limit reached
        work()
    else:
        thread.join(_PATIENCE_SECONDS)


def _new_bar() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn
    from rich.table import Table

    class Bars(Progress):
        """A bar of the steps, and another one of an activity that takes longer than a moment."""

        def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
            return super().make_tasks_table(
                [task for task in tasks if task.description == "steps" or (task.elapsed or 0) > _MOMENT_SECONDS]
            )

    bar = Bars(
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        # rich would redirect standard error through the terminal too, where it may block forever.
        redirect_stdout=False,
        redirect_stderr=False,
    )
    bar.start()
    return bar
