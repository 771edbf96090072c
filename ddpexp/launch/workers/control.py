"""The control channel between a worker and its supervisor.

Lines of JSON on an inherited socket carry messages; a page of shared memory holds what a step reads and writes without
a system call, and which collectives the rank has called, where the supervisor inquires; a second socket gets the
numbers of the signals that the worker receives, written by the C-level signal handler whatever the worker is waiting
for.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import time
import typing
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

from ddpexp.errors import DdpexpError
from ddpexp.launch.workers.collectives import Record, pack

CONTROL_FD = "DDPEXP_CONTROL_FD"
PAGE_FD = "DDPEXP_PAGE_FD"
SIGNALS_FD = "DDPEXP_SIGNALS_FD"
STORE_FD = "DDPEXP_STORE_FD"
TERMINAL_FD = "DDPEXP_TERMINAL_FD"

What = Literal["save", "end", "stop"]  # save and continue; end the run early, as configured; save and leave
_WHATS: tuple[What, ...] = typing.get_args(What)  # of several at one step the last in this order is done
Phase = Literal["start", "join", "build", "data", "train", "evaluate", "save", "leave"]
PHASES: tuple[Phase, ...] = typing.get_args(Phase)  # in the order of a run's first ones
_NUMBERS = {name: number for number, name in enumerate(PHASES)}
# The signals that a run handles. A rank that receives one forwards it, and its supervisor handles it as if the command
# had received it.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)

_PAGE_BYTES = 16384  # memory that nobody touches is never allocated
# Indices of the page's 64-bit words. Words written by the rank and by the command are in separate cache lines.
_STEP = 0  # rank: steps done, plus one; 0 before the first is known
_WAITS, _WAITS_AT = 1, 2  # rank: the agreement whose step it waits for, and the step boundary where it waits
_WISH = 3  # rank zero: what it wants the agreement with this number to do, unless that does something anyway
_PHASE, _BEATS = 4, 5  # rank: its phase, and the number of heartbeats within a step
_NEWEST = 32  # command: the number of the newest agreement; at their next boundary the ranks wait for its step
_STOPPING = 33  # command: the signal that stops the run
_LEAVES = 34  # command: the rank is to exit at once when it gets SIGTERM
_TURN = 35  # command: the answer to the rank's request for the terminal: twice its number, plus one if it is granted
_AGREED = 48  # command: for each of the newest agreements its number, then its step and action
_SLOTS = 8
_INQUIRY, _RECORD_BYTES = 64, 65  # rank: the inquiry that its record answers, and the record's length
_RECORD = 1024  # the byte at which the record begins
_NAP_SECONDS = 0.0002
_TURN_NAP_SECONDS = 0.01
_QUIT_SECONDS = 2.0
_ANSWER_SECONDS = 600.0  # far longer than a live command takes to name a step, unless it is stopped


class SharedStatus:
    """The shared page of one rank, as the command sees it; anonymous memory, freed with the last process that maps it.

    It needs no locks: each word has one writer, is written atomically, and writes are seen in order. x86_64 guarantees
    that order.
    """

    def __init__(self, descriptor: int) -> None:
        """Map the memory behind the descriptor; the caller keeps the descriptor."""
        self._memory = mmap.mmap(descriptor, _PAGE_BYTES)
        self.words = memoryview(self._memory).cast("Q")

    @classmethod
    def make(cls) -> tuple[SharedStatus, int]:
        """Return a new page, and a descriptor for the rank."""
        descriptor = os.memfd_create("ddpexp-control")
        os.ftruncate(descriptor, _PAGE_BYTES)
        return cls(descriptor), descriptor

    @property
    def step(self) -> int | None:
        """Return the number of steps that the rank has done; None before it is known."""
        return self.words[_STEP] - 1 if self.words[_STEP] else None

    @property
    def wish(self) -> tuple[int, What]:
        """Return the number of the agreement that rank zero wants, and what for; 0 for none."""
        number, what = divmod(self.words[_WISH], len(_WHATS))
        return number, _WHATS[what]

    @property
    def phase(self) -> Phase:
        """Return the rank's phase."""
        return PHASES[self.words[_PHASE]]

    @property
    def progress(self) -> tuple[int, int, int]:
        """Return a value that changes whenever the rank makes progress."""
        return self.words[_STEP], self.words[_PHASE], self.words[_BEATS]

    def begin(self, number: int) -> None:
        """Make the rank wait at its next step boundary for the step of this agreement."""
        self.words[_NEWEST] = number

    def bound(self, number: int) -> int:
        """Return the boundary where the rank waits for this agreement, or the latest one where it will.

        To be called a moment after `begin`, when the rank's next poll is sure to see it.
        """
        if self.words[_WAITS] == number:
            return self.words[_WAITS_AT]
        return self.words[_STEP]  # the step in progress

    def commit(self, number: int, step: int, what: What) -> None:
        """Publish the step of this agreement."""
        slot = _slot(number)
        self.words[slot + 1] = len(_WHATS) * step + _WHATS.index(what)
        self.words[slot] = number  # last: it makes the other word valid

    def stop(self, number: int) -> None:
        """Publish the signal that stops the run."""
        self.words[_STOPPING] = number

    def leave(self) -> None:
        """Make the rank exit at once on its next SIGTERM."""
        self.words[_LEAVES] = 1

    def answer(self, number: int, granted: bool) -> None:
        """Answer the rank's request for the terminal."""
        self.words[_TURN] = 2 * number + granted

    def record(self, number: int) -> bytes | None:
        """Return which collectives the rank has called, packed; None if it has not answered this inquiry."""
        if self.words[_INQUIRY] != number:
            return None
        return self._memory[_RECORD : _RECORD + self.words[_RECORD_BYTES]]

    def publish_record(self, number: int, record: Record) -> None:
        """Answer an inquiry."""
        packed = pack(record, _PAGE_BYTES - _RECORD)
        self.words[_INQUIRY] = 0
        self._memory[_RECORD : _RECORD + len(packed)] = packed
        self.words[_RECORD_BYTES] = len(packed)
        self.words[_INQUIRY] = number  # last: it makes the rest valid

    def close(self) -> None:
        """Unmap the page."""
        self.words.release()
        self._memory.close()


def _slot(number: int) -> int:
    return _AGREED + 2 * (number % _SLOTS)


class Control:
    """The worker's end of the channel. Without a supervisor (another launcher) messages are dropped and polls empty."""

    def __init__(
        self,
        channel: socket.socket | None,
        page: SharedStatus | None = None,
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
        self._page = page
        self._words = page.words if page else None
        self._leads = leads
        self._step: int | None = None
        self._acted = 0  # the newest agreement that was acted upon
        self._turns = 0  # requests for the terminal
        self.terminal: int | None = None  # a descriptor of the command's terminal, for debuggers
        self.at_prompt = False  # a debugger reads from the terminal: SIGINT is for it, others are forwarded by hand

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Control:
        """Open the descriptors that the launcher passed to this process."""
        channel, page, signals = (environ.get(name) for name in (CONTROL_FD, PAGE_FD, SIGNALS_FD))
        control = cls(
            socket.socket(fileno=int(channel)) if channel else None,
            SharedStatus(int(page)) if page else None,
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

    def set_phase(self, phase: Phase) -> None:
        """Publish the phase that this rank enters; costs 0.1 us. Ranks: any."""
        if self._words is not None:
            self._words[_PHASE] = _NUMBERS[phase]

    @property
    def phase(self) -> Phase | None:
        """Return this rank's phase; None without a supervisor."""
        return None if self._page is None else self._page.phase

    def heartbeat(self) -> None:
        """Record progress within the phase; costs 0.1 us. Ranks: any."""
        if self._words is not None:
            self._words[_BEATS] += 1

    @property
    def step(self) -> int | None:
        """Return the number of steps done, for error reports; None before the training loop has set it."""
        return self._step

    @step.setter
    def step(self, done: int) -> None:
        self._step = done
        if self._words is not None:
            self._words[_STEP] = done + 1

    def poll(self, done: int, save: bool = False, end: bool = False) -> What | None:
        """Return what all ranks do now, after step `done`; usually nothing. Costs 0.2 us.

        Ranks: all, at every step boundary but the last; `save` and `end` are rank zero's requests. After a request each
        rank waits at its next boundary for the step that the commands agree on: the first that no rank has passed. So
        it does not matter how far apart the ranks are, nor what they wait for within a step.

        Raises:
            DdpexpError: the agreed step has passed, or the command does not publish one.
        """
        words = self._words
        if words is None:  # a single rank without a command that watches it
            if not self._leads or not (save or end):
                return None
            return "end" if end else "save"
        self._step = done
        words[_STEP] = done + 1  # before reading _NEWEST: the command writes _NEWEST first, then reads this word
        if (save or end) and self._leads:
            words[_WISH] = len(_WHATS) * (self._acted + 1) + end  # the places of "save" and "end"
        return self._agreed(done) if words[_NEWEST] != self._acted else None

    @property
    def stop_requested(self) -> bool:
        """Return whether a stop was requested; ranks may see it at different moments."""
        return self._words is not None and self._words[_STOPPING] != 0

    @property
    def leaves_at_once(self) -> bool:
        """Return whether this rank is to exit at once on SIGTERM, because the command ends it."""
        return self._words is None or self._words[_LEAVES] != 0

    def send_nowait(self, kind: str, **fields: Any) -> None:
        """Send a message if there is room, else drop it: training never waits for a terminal."""
        if self._channel is None or not self._flush():
            return
        self._rest = _line(kind, fields)
        self._flush()

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
        if self._words is None:
            return False
        self._turns += 1
        self.send("prompt", number=self._turns)
        while self._words[_TURN] >> 1 != self._turns:
            time.sleep(_TURN_NAP_SECONDS)
        return bool(self._words[_TURN] & 1)

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
        while self._words is not None and time.monotonic() < deadline:
            if self.stop_requested and self._words[_NEWEST] != self._acted:
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
        if self._page is not None:
            self._page.publish_record(number, record)

    def _agreed(self, done: int) -> What | None:
        words, agreed = self._words, -1
        assert words is not None
        newest = self._wait_for_step(done)
        while self._acted < newest:
            slot = _slot(self._acted + 1)
            step, what = divmod(words[slot + 1], len(_WHATS))
            if words[slot] != self._acted + 1 or step < done:
                raise DdpexpError(
                    f"after step {done} this rank learns of agreement {self._acted + 1}, which was for step {step}: "
                    "the ranks would diverge here",
                    suggestion="Please report this with the rank's log.",
                )
            if step > done:
                break
            self._acted += 1
            agreed = max(agreed, what)
        return _WHATS[agreed] if agreed >= 0 else None

    def _wait_for_step(self, done: int) -> int:
        """Wait until the newest agreement has its step, and return its number. They are committed in order."""
        words = self._words
        assert words is not None
        begin = time.monotonic()
        while words[_slot(newest := words[_NEWEST])] != newest:
            words[_WAITS_AT] = done
            words[_WAITS] = newest  # last: it makes the other word valid
            time.sleep(_NAP_SECONDS)
            if time.monotonic() - begin > _ANSWER_SECONDS:
                raise DdpexpError(
                    f"the command did not name the step to save at within {_ANSWER_SECONDS:g} s",
                    suggestion="Check whether the command is stopped.",
                )
        return newest

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
