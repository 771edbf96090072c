"""The control channel between a worker and its supervisor.

Lines of JSON on an inherited socket carry messages; a page of shared memory carries the rest, see `page`; a second
socket gets the numbers of the signals that the worker receives, written by the C-level signal handler whatever the
worker is waiting for.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ddpexp.launch.workers.collectives import Record
from ddpexp.launch.workers.page import Page, What

CONTROL_FD = "DDPEXP_CONTROL_FD"
PAGE_FD = "DDPEXP_PAGE_FD"
SIGNALS_FD = "DDPEXP_SIGNALS_FD"
STORE_FD = "DDPEXP_STORE_FD"
TERMINAL_FD = "DDPEXP_TERMINAL_FD"

# The signals that a run handles. A rank that receives one forwards it, and its supervisor handles it as if the command
# had received it.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
_TURN_NAP_SECONDS = 0.01
_QUIT_SECONDS = 2.0
_ACTIVITY_SECONDS = 0.2  # between two messages about it


class Control:
    """The worker's end of the channel. Without a supervisor (another launcher) messages are dropped and polls empty."""

    def __init__(
        self,
        channel: socket.socket | None,
        page: Page | None = None,
        signals: int | None = None,
        leads: bool = False,
        in_process: bool = False,
    ) -> None:
        """Take over the socket, the page and the descriptor for signals, if there are any.

        `leads`: this is rank zero, which may request a save or the end of the run. `in_process`: the worker is the
        command's own process.
        """
        self.in_process = in_process
        self.signals = signals  # gets the numbers of the signals that this process receives
        self._channel = channel
        self._rest = b""  # the unsent part of a line
        self._is_alone = page is None  # nobody reads the rank's page, nor answers it
        self._page = page or Page()
        self.status = self._page.status
        self._agreements = self._page.agreements
        self._leads = leads
        self._acted = 0  # the newest agreement that was acted upon
        self.profile_steps = 0  # to profile after the step where something was due last
        self._shown_at = 0.0
        self._turns = 0  # requests for the terminal
        self.terminal: int | None = None  # a descriptor of the command's terminal, for debuggers
        self.at_prompt = False  # a debugger reads from the terminal: SIGINT is for it, others are forwarded by hand

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Control:
        """Open the descriptors that the launcher passed to this process."""
        channel, page, signals = (environ.get(name) for name in (CONTROL_FD, PAGE_FD, SIGNALS_FD))
        control = cls(
            socket.socket(fileno=int(channel)) if channel else None,
            Page(int(page)) if page else None,
            int(signals) if signals else None,
            environ.get("RANK", "0") == "0",
        )
        if terminal := environ.get(TERMINAL_FD):
            control.terminal = int(terminal)
            os.set_inheritable(control.terminal, False)  # for programs that this process starts
        return control

    @property
    def is_supervised(self) -> bool:
        """Return whether there is a supervisor, which gets errors and requests."""
        return self._channel is not None

    @property
    def watched(self) -> bool:
        """Return whether progress and warnings go to a supervisor instead of to standard output."""
        return self.is_supervised and not self.in_process

    def poll(self, done: int, save: bool = False, end: bool = False) -> What | None:
        """Return what all ranks do now, after step `done`; usually nothing. Costs 0.2 us.

        Ranks: all, at every step boundary but the last; `save` and `end` are rank zero's requests. After a request each
        rank waits at its next boundary for the step that the commands agree on: the first that no rank has passed. So
        it does not matter how far apart the ranks are, nor what they wait for within a step.

        Raises:
            DdpexpError: the agreed step has passed, or the command does not publish one.
        """
        agreements = self._agreements
        # Before reading `newest`: the command writes that word first, then reads this one.
        agreements.current_step[0] = done + 1
        if (save or end) and self._leads:
            what: What = "end" if end else "save"
            if self._is_alone:
                return what
            agreements.request(self._acted + 1, what)
        if agreements.newest[0] == self._acted:
            return None
        before = self._acted
        self._acted, due = agreements.due(before, done)
        self.profile_steps = agreements.profile(before, self._acted)
        return due

    @property
    def stop_requested(self) -> bool:
        """Return whether a stop was requested; ranks may see it at different moments."""
        return self._page.stop.requested

    @property
    def leaves_at_once(self) -> bool:
        """Return whether this rank is to exit at once on SIGTERM, because the command ends it."""
        return self._is_alone or self._page.stop.leaves_at_once

    def send_nowait(self, kind: str, **fields: Any) -> None:
        """Send a message if there is room, else drop it: training never waits for a terminal."""
        if self._channel is None or not self._flush():
            return
        self._rest = _line(kind, fields)
        self._flush()

    def show_activity(self, text: str, done: int = 0, total: int = 0) -> None:
        """Have the command show what is done between two steps, until `done` is `total`, but at least 1."""
        now = time.monotonic()
        is_end = total > 0 and done >= total
        if self.watched and self._leads and (is_end or done == 0 or now - self._shown_at >= _ACTIVITY_SECONDS):
            self._shown_at = now
            self.send_nowait("activity", text=text, done=done, total=total, after=os.fstat(1).st_size)

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message that must arrive, waiting while the supervisor is stopped; its death ends this process too."""
        if self._channel is None:
            return
        try:
            self._channel.setblocking(True)
            self._channel.sendall(self._rest + _line(kind, fields))
            self._rest = b""
        except OSError:
            return  # the supervisor is gone

    def forward(self, number: int) -> None:
        """Forward a signal to the supervisor, where the C-level handler does not."""
        if self.signals is not None:
            with suppress(BlockingIOError):
                os.write(self.signals, bytes([number]))

    def request_terminal(self) -> bool:
        """Wait for this rank's turn at the command's terminal; return whether it gets it: not if the run stops."""
        if self._is_alone:
            return False
        self._turns += 1
        self.send("prompt", number=self._turns)
        while (granted := self._page.terminal.is_granted(self._turns)) is None:
            time.sleep(_TURN_NAP_SECONDS)
        return granted

    def quit_debugger(self) -> None:
        """Request a stop after this step, and wait for a moment until the supervisor has begun it."""
        self.send("quit", at_once=False)
        self._wait_for_stop()

    def hang_up(self) -> None:
        """Request the stop that SIGHUP means: the terminal of a prompt is closed. Wait like `quit_debugger`."""
        self.forward(signal.SIGHUP)
        self._wait_for_stop()

    def _wait_for_stop(self) -> None:
        deadline = time.monotonic() + _QUIT_SECONDS
        while not self._is_alone and time.monotonic() < deadline:
            if self.stop_requested and self._agreements.newest[0] != self._acted:
                return  # else a rank with short steps would be some steps further
            time.sleep(_TURN_NAP_SECONDS)

    def return_terminal(self, stepping: bool) -> None:
        """Give the terminal back; `stepping`: only until the next line was executed."""
        self.send("prompted", stepping=stepping)

    def wait_for_inquiry(self) -> int | None:
        """Wait until the supervisor inquires which collectives this rank has called; return the inquiry's number.

        None when there is no supervisor (any more). For a thread of its own.
        """
        if self._channel is None:
            return None
        received = b""
        while not received.endswith(b"\n"):
            try:
                data = self._channel.recv(1 << 12)
            except OSError:
                return None
            if not data:
                return None
            received += data
        return int(received.split()[-1])  # the newest

    def publish_record(self, number: int, record: Record) -> None:
        """Answer an inquiry; any thread may call this."""
        self._page.collectives.publish(number, record)

    def _flush(self) -> bool:
        """Send the rest of the last line; return whether all of it was sent."""
        assert self._channel is not None
        try:
            while self._rest:
                self._rest = self._rest[self._channel.send(self._rest, socket.MSG_DONTWAIT) :]
        except OSError:
            return False
        return True


def _line(kind: str, fields: Mapping[str, Any]) -> bytes:
    return json.dumps({"kind": kind, **fields}).encode() + b"\n"
