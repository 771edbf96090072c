"""Lend the command's terminal to the ranks that are at a breakpoint, one at a time; used by the supervisor."""

from __future__ import annotations

import os
import signal
import termios
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ddpexp.launch.supervise.messages import TerminalRequested, TerminalReturned
from ddpexp.launch.supervise.output import Output
from ddpexp.launch.supervise.state import State
from ddpexp.launch.supervise.worker import Worker
from ddpexp.system.terminal_mode import ModeGuard, is_in_foreground

# A rank that executes one line comes back to its prompt before another rank gets the terminal, unless that line takes
# longer: it may wait for the other rank.
_STEPPING_SECONDS = 0.5


@dataclass(frozen=True)
class _Request:
    worker: Worker
    number: int


class DebugTurns:
    """Which rank has the terminal, and which wait for it."""

    def __init__(self, terminal: int | None, output: Output, state: Callable[[], State], size: int) -> None:
        """`terminal` is a descriptor of the command's terminal, if it has one; `size` is the number of ranks.

        `state` returns what the command knows of the run.
        """
        self._terminal = terminal
        self._output = output
        self._state = state
        self._size = size
        self._waiting: deque[_Request] = deque()
        self._holder: Worker | None = None
        self._stepping: Worker | None = None  # it executes a line, and is expected back
        self._expected_until = 0.0
        self._is_closing = False  # the holder was asked to leave its prompt, or does so
        self._guard: ModeGuard | None = None

    @property
    def are_active(self) -> bool:
        """Return whether a rank is at a breakpoint."""
        return self._holder is not None or bool(self._waiting)

    def on_request(self, worker: Worker, message: TerminalRequested) -> None:
        """Note that a rank is at a breakpoint."""
        if worker.rank != 0 and worker is not self._stepping:
            worker.log.skip()
        self._waiting.append(_Request(worker, message.number))
        self.advance()

    def on_return(self, worker: Worker, message: TerminalReturned) -> None:
        """Take the terminal back: the rank continues, or executes a line; then nothing is drawn in between."""
        self._stepping = worker if message.stepping else None
        self._expected_until = time.monotonic() + _STEPPING_SECONDS
        self._take_back()
        self.advance()

    def interrupt(self) -> bool:
        """Pass Ctrl-C on to the rank that has the terminal; return whether there is one."""
        if self._holder is None:
            return False
        _send(self._holder, signal.SIGINT)
        return True

    def on_quit(self) -> None:
        """Note that the rank that has the terminal leaves its prompt by itself."""
        self._is_closing = True

    def advance(self) -> None:
        """Lend the terminal to the next rank, if there is one and the terminal is free; end prompts once a run ends."""
        if self._holder is not None and self._has_ended(self._holder):
            self._take_back()
        ends = self._state().stop is not None
        if self._holder is not None:
            if ends and not self._is_closing:
                self._is_closing = True
                _send(self._holder, signal.SIGTERM)
            return
        if ends:
            while self._waiting:
                denied = self._waiting.popleft()
                denied.worker.page.terminal.answer(denied.number, granted=False)
        elif (request := self._next()) is not None:
            self._lend(request)
            return
        if self._stepping is None or ends or time.monotonic() > self._expected_until:
            self._output.terminal.resume()

    def close(self) -> None:
        """Restore the terminal's mode at the end of the run."""
        self._take_back()
        if self._guard is not None:
            self._guard.close()

    def _next(self) -> _Request | None:
        """Return the next request, if its rank can have the terminal now."""
        self._waiting = deque(request for request in self._waiting if not self._has_ended(request.worker))
        if not self._waiting or self._terminal is None:
            return None
        back = next((request for request in self._waiting if request.worker is self._stepping), None)
        if back is None and self._stepping is not None and time.monotonic() < self._expected_until:
            return None
        if not is_in_foreground(self._terminal):
            self._output.line("ddpexp: a rank is at a breakpoint: bring this command to the foreground (fg)")
            return None
        return back or self._waiting[0]

    def _lend(self, request: _Request) -> None:
        assert self._terminal is not None
        worker = request.worker
        self._waiting.remove(request)
        for line in worker.log.new_lines():
            self._output.terminal.line(f"[rank {worker.rank}] {line}" if worker.rank else line)
        if worker is not self._stepping:
            others = "; the other ranks wait" if self._size > 1 else ""
            self._output.terminal.line(
                f"ddpexp: rank {worker.rank} is at a breakpoint{others}. c continues, q saves and stops the run."
            )
        self._output.terminal.resume()
        self._output.terminal.pause()
        with suppress(termios.error):  # the terminal is closed, which the rank reports
            self._guard = self._guard or ModeGuard(self._terminal)
            self._guard.begin()
        self._holder, self._is_closing = worker, False
        worker.page.terminal.answer(request.number, granted=True)

    def _has_ended(self, worker: Worker) -> bool:
        return self._state().rank(worker.rank).code is not None

    def _take_back(self) -> None:
        if self._holder is not None:
            self._holder = None
            if self._guard is not None:
                self._guard.restore()


def _send(worker: Worker, number: int) -> None:
    if worker.pid is not None:
        with suppress(ProcessLookupError):  # it has ended, and its exit is not reported yet
            os.kill(worker.pid, number)
