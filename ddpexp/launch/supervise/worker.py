"""One rank's process as its command holds it: the ends of its channels, its log, and how it ended."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass

from ddpexp.errors import EXIT_FAILED, Failure
from ddpexp.launch.supervise import mismatch
from ddpexp.launch.workers.lines import Lines
from ddpexp.launch.workers.page import Page
from ddpexp.launch.workers.rank_log import Log

_LAST_LINES = 20
_SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}  # most real-time signals have none


@dataclass
class Worker:
    """One rank's process."""

    rank: int
    control: Lines
    log: Log
    page: Page
    signals: socket.socket  # the numbers of the signals that it receives itself
    pid: int | None = None
    step: int | None = None  # the last one that it has reported
    dumps: int = 0  # SIGQUITs from the supervisor that it has not forwarded back yet

    @property
    def last_step(self) -> int | None:
        """Return the last known number of steps that it has done."""
        return self.step if self.page.status.step is None else self.page.status.step

    def exit_seen(self, code: int, killed_for: str | None = None) -> Failure:
        """Return the end of the process as a failure, which it is unless the rank has ended well: see `Rank.cause`.

        `code` is minus the number of a signal; `killed_for` says why the kernel killed it, where it did.
        """
        if code - 128 in _SIGNAL_NAMES:
            kind = _SIGNAL_NAMES[code - 128]
            message = f"ended by {kind}, which did not come through the command"
            return self.failure_seen(kind, message, signum=code - 128)
        if code >= 0:
            message = f"the process ended with exit code {code} before its work was done"
            return self.failure_seen("SystemExit", message, exit_code=code if 3 <= code <= 125 else EXIT_FAILED)
        kind = _SIGNAL_NAMES.get(-code, f"signal {-code}")
        if code == -signal.SIGABRT and mismatch.is_in(self.log):
            return self.failure_seen(mismatch.KIND, mismatch.MESSAGE, signum=-code)
        why = f": {killed_for}" if killed_for else ""
        return self.failure_seen(kind, f"killed by {kind}{why}", signum=-code)

    def failure_seen(self, kind: str, message: str, signum: int | None = None, exit_code: int = EXIT_FAILED) -> Failure:
        """Return a failure as seen from outside, with the last lines of the rank's log."""
        return Failure(
            rank=self.rank,
            host=os.uname().nodename,
            kind=kind,
            message=message,
            step=self.last_step,
            phase=self.page.status.phase,
            signal=signum,
            traceback=self.log.last_lines(_LAST_LINES),
            exit_code=exit_code,
        )

    def log_failure(self, failure: Failure | None) -> None:
        """Append the rank's own error, if there is one, to its log; the terminal shows only the first cause."""
        if failure is not None:
            self.log.add(f"{failure.traceback or ''}{failure.kind}: {failure.message}\n")
