"""What the terminal shows of a command's workers: rank zero's output, and each warning once; used by the supervisor."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from ddpexp.launch.supervise.messages import Activity, Progress
from ddpexp.launch.supervise.stacks import is_native_frame, is_stack
from ddpexp.launch.supervise.worker import Worker
from ddpexp.system.terminal import Terminal

_HOLD_SECONDS = 0.3  # a warning of another rank waits this long for the same warning of rank zero


@dataclass
class Output:
    """The terminal, and the warnings that wait to be shown. Where `forward` is given, it gets other ranks' warnings."""

    terminal: Terminal
    forward: Callable[[int, str], None] | None = None
    _shown: set[str] = field(default_factory=set)  # every rank logs the same warnings
    _held: dict[str, tuple[int, float]] = field(default_factory=dict)  # by text: the rank, and since when

    def progress(self, worker: Worker, progress: Progress) -> None:
        """Show progress, below the output that the worker wrote before it."""
        self.lines_of(worker, until=progress.after)
        self.terminal.progress(asdict(progress))

    def activity(self, worker: Worker, activity: Activity) -> None:
        """Show what is done between two steps, likewise."""
        self.lines_of(worker, until=activity.after)
        self.terminal.activity(activity.text, activity.done, activity.total)

    def lines_of(
        self, worker: Worker, last: bool = False, until: float = math.inf, without_stacks: bool = False
    ) -> None:
        """Show the new output of a worker."""
        for line in worker.log.new_lines(last, until):
            if not (without_stacks and is_stack(line)) and not is_native_frame(line):  # those are in the log alone
                self.terminal.line(line)

    def line(self, text: str) -> None:
        """Show a line once."""
        if text not in self._shown:
            self._shown.add(text)
            self.terminal.line(text)

    def warned(self, rank: int, text: str) -> None:
        """Note a warning. Rank zero's is in its output; another rank's is shown unless rank zero logs it soon."""
        if rank == 0:
            self._shown.add(text)
            self._held.pop(text, None)
        elif text in self._shown:
            return
        elif self.forward is None:
            self._held.setdefault(text, (rank, time.monotonic()))
        else:
            self._shown.add(text)
            self.forward(rank, text)

    def show_warnings(self, all_of_them: bool = False) -> None:
        """Show other ranks' warnings that rank zero has not logged in the meantime, with the first rank of each."""
        held_since = math.inf if all_of_them else time.monotonic() - _HOLD_SECONDS
        for text, (rank, since) in list(self._held.items()):
            if since <= held_since:
                self.terminal.line(f"[rank {rank}] {text}")
                self._shown.add(text)
                del self._held[text]
