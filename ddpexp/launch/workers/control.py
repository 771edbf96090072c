"""What a worker and the process that watches it tell each other.

Lines of JSON on an inherited socket, for what is read as it comes; a page of shared memory, for what a step may look at
without a system call; and a socket for the signals that the worker gets itself, which the operating system's handler
writes whatever the worker waits for.
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
from typing import Any, Literal

from ddpexp.errors import DdpexpError

CONTROL_FD = "DDPEXP_CONTROL_FD"
PAGE_FD = "DDPEXP_PAGE_FD"
SIGNALS_FD = "DDPEXP_SIGNALS_FD"
STORE_FD = "DDPEXP_STORE_FD"

What = Literal["save", "stop"]
Phase = Literal["start", "join", "build", "data", "train", "evaluate", "save", "leave"]
PHASES: tuple[Phase, ...] = typing.get_args(Phase)  # in the order of a run's first ones
_NUMBERS = {name: number for number, name in enumerate(PHASES)}
# What mean something to a run. A rank that gets one itself passes it on, so that its watch takes it as if the command
# had got it.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)

_PAGE_BYTES = 4096
# The words of the page, 64 bits each, those of the rank and those of the command in cache lines of their own.
_STEP = 0  # of the rank: steps done, plus one; 0 before the first is known
_WAITS, _WAITS_AT = 1, 2  # of the rank: the agreement whose step it waits for, and the boundary where it does
_WISH = 3  # of rank zero: it would like to save, unless the agreement of this number does so anyway
_PHASE, _BEATS = 4, 5  # of the rank: what it is at, and how often it has come further in that without a step being done
_NEWEST = 32  # of the command: the number of the newest agreement; at their next boundary the ranks wait for its step
_STOPPING = 33  # of the command: the signal that stops the run
_LEAVES = 34  # of the command: the rank is to leave at once when it gets SIGTERM
_AGREED = 48  # of the command: for each of the newest agreements its number, and its step with what to do
_SLOTS = 8
_NAP_SECONDS = 0.0002
_ANSWER_SECONDS = 600.0  # far longer than a command that lives takes to name a step, unless somebody has stopped it


class SharedStatus:
    """The page of one rank, as the command sees it; anonymous memory that is gone with the last process that has it.

    Nobody locks: each word has one writer, is written whole, and is seen in the order of the writes. x86_64 keeps that
    order by itself.
    """

    def __init__(self, descriptor: int) -> None:
        """Map the memory behind the descriptor, which stays the caller's."""
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
        """Return the steps that the rank has done; None before the first is known."""
        return self.words[_STEP] - 1 if self.words[_STEP] else None

    @property
    def wish(self) -> int:
        """Return the number of the agreement that rank zero wishes for."""
        return self.words[_WISH]

    @property
    def phase(self) -> Phase:
        """Return what the rank is at."""
        return PHASES[self.words[_PHASE]]

    @property
    def progress(self) -> tuple[int, int, int]:
        """Return what changes whenever the rank comes further."""
        return self.words[_STEP], self.words[_PHASE], self.words[_BEATS]

    def begin(self, number: int) -> None:
        """Have the rank wait at its next boundary for the step of this agreement."""
        self.words[_NEWEST] = number

    def bound(self, number: int) -> int:
        """Return the boundary where the rank waits for this agreement, or will at the latest.

        To be asked a moment after `begin`, when the rank's next look is sure to see it.
        """
        if self.words[_WAITS] == number:
            return self.words[_WAITS_AT]
        return self.words[_STEP]  # the step that it is in

    def settle(self, number: int, step: int, what: What) -> None:
        """Name the step of this agreement."""
        place = _slot(number)
        self.words[place + 1] = 2 * step + (what == "stop")
        self.words[place] = number  # last: it makes the other one valid

    def stop(self, number: int) -> None:
        """Show that this signal stops the run."""
        self.words[_STOPPING] = number

    def leave(self) -> None:
        """Have the rank leave at once with its next SIGTERM."""
        self.words[_LEAVES] = 1

    def close(self) -> None:
        """Give the command's view back."""
        self.words.release()
        self._memory.close()


def _slot(number: int) -> int:
    return _AGREED + 2 * (number % _SLOTS)


class Control:
    """A worker's end. Without a watcher (a launcher that is not ours) every message is dropped, and nobody asks.

    For anything.
    """

    def __init__(
        self,
        channel: socket.socket | None,
        page: SharedStatus | None = None,
        signals: int | None = None,
        leads: bool = False,
    ) -> None:
        """Take over the socket, the page and the descriptor for signals, if there are any.

        `leads` is for rank zero, whose wishes count.
        """
        self.signals = signals  # takes the numbers of the signals that this process gets
        self._channel = channel
        self._rest = b""  # of a line that did not fit whole
        self._words = page.words if page else None
        self._leads = leads
        self._step: int | None = None
        self._acted = 0  # agreements that were acted upon

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Control:
        """Open what the launcher left in this process."""
        channel, page, signals = (environ.get(name) for name in (CONTROL_FD, PAGE_FD, SIGNALS_FD))
        return cls(
            socket.socket(fileno=int(channel)) if channel else None,
            SharedStatus(int(page)) if page else None,
            int(signals) if signals else None,
            environ.get("RANK", "0") == "0",
        )

    @property
    def watched(self) -> bool:
        """Tell whether somebody reads: then progress goes there instead of to standard output."""
        return self._channel is not None

    def set_phase(self, phase: Phase) -> None:
        """Say what this rank is at from now on; costs 0.1 us. Ranks: any."""
        if self._words is not None:
            self._words[_PHASE] = _NUMBERS[phase]

    def heartbeat(self) -> None:
        """Say that this rank has come further within its phase; costs 0.1 us. Ranks: any."""
        if self._words is not None:
            self._words[_BEATS] += 1

    @property
    def step(self) -> int | None:
        """Return the steps done, so that an error can say where it happened; None before the loop has said."""
        return self._step

    @step.setter
    def step(self, done: int) -> None:
        self._step = done
        if self._words is not None:
            self._words[_STEP] = done + 1

    def poll(self, done: int, save: bool = False) -> What | None:
        """Return what all ranks do now, after step `done`: save, or save and stop; mostly nothing. Costs 0.2 us.

        Ranks: all, at every step boundary but the last; `save` is rank zero's own wish. When somebody asks for
        something, each rank waits at its next boundary for the step that the commands agree on: the first that no rank
        has passed. So it does not matter how far apart the ranks are, nor what they wait for within a step.

        Raises:
            DdpexpError: the step has passed, or the command does not name one.
        """
        words = self._words
        if words is None:
            return None
        self._step = done
        words[_STEP] = done + 1  # before the look at _NEWEST: the command writes that first, and then looks here
        if save and self._leads:
            words[_WISH] = self._acted + 1
        return self._agreed(done) if words[_NEWEST] != self._acted else None

    @property
    def asked_to_stop(self) -> bool:
        """Tell whether a stop is asked for; ranks may see it at different moments."""
        return self._words is not None and self._words[_STOPPING] != 0

    @property
    def leaves_at_once(self) -> bool:
        """Tell whether a SIGTERM comes from the command, which ends this rank."""
        return self._words is None or self._words[_LEAVES] != 0

    def send_nowait(self, kind: str, **fields: Any) -> None:
        """Send a message if there is room; never waits, for training does not wait for a terminal."""
        if self._channel is None or not self._flush():
            return
        self._rest = _line(kind, fields)
        self._flush()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message that must arrive, however long the watcher is stopped; its death ends this process anyway."""
        if self._channel is None:
            return
        try:
            self._channel.setblocking(True)
            self._channel.sendall(self._rest + _line(kind, fields))
            self._rest = b""
        except OSError:
            return  # the watcher is gone

    def _agreed(self, done: int) -> What | None:
        words, what = self._words, None
        assert words is not None
        newest = self._wait_for_step(done)
        while self._acted < newest:
            place = _slot(self._acted + 1)
            step, stops = divmod(words[place + 1], 2)
            if words[place] != self._acted + 1 or step < done:
                raise DdpexpError(
                    f"after step {done} this rank learns of agreement {self._acted + 1}, which was for step {step}: "
                    "the ranks "
                    f"would part here. Please report this with the rank's log."
                )
            if step > done:
                break
            self._acted += 1
            what = "stop" if stops or what == "stop" else "save"
        return what  # type: ignore[return-value]

    def _wait_for_step(self, done: int) -> int:
        """Wait until the newest agreement has its step, and return its number. They are settled one after the other."""
        words = self._words
        assert words is not None
        begin = time.monotonic()
        while words[_slot(newest := words[_NEWEST])] != newest:
            words[_WAITS_AT] = done
            words[_WAITS] = newest  # last: it makes the other one valid
            time.sleep(_NAP_SECONDS)
            if time.monotonic() - begin > _ANSWER_SECONDS:
                raise DdpexpError(
                    f"the command did not say within {_ANSWER_SECONDS:g} s at which step to save: is it stopped?"
                )
        return newest

    def _flush(self) -> bool:
        """Send what is left of the last line; tell whether all of it went."""
        assert self._channel is not None
        try:
            while self._rest:
                self._rest = self._rest[self._channel.send(self._rest, socket.MSG_DONTWAIT) :]
        except OSError:
            return False
        return True


def _line(kind: str, fields: Mapping[str, Any]) -> bytes:
    return json.dumps({"kind": kind, **fields}).encode() + b"\n"


class Lines:
    """The watcher's end: messages out of the bytes that arrive."""

    def __init__(self, channel: socket.socket, rest: bytes = b"") -> None:
        """Take over the socket; `rest` was read from it before."""
        channel.setblocking(False)
        self.channel = channel
        self._rest = rest

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the complete messages that have arrived, and whether the channel is still open."""
        open_ = True
        while True:
            try:
                data = self.channel.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                open_ = False
                break
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines if line], open_
