"""The page of memory that a rank shares with its command: what a step reads and writes without a system call.

It needs no locks: each word has one writer and is written atomically, and writes are seen in order. x86_64 guarantees
that order. A value that only counts together with another one is packed into the same word, or written before the
word that makes it valid.
"""

from __future__ import annotations

import mmap
import os
import time
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ddpexp.errors import DdpexpError
from ddpexp.launch.workers.collectives import Record, pack

# Profile some steps; save and continue; end the run early, as configured; save and leave.
What = Literal["profile", "save", "end", "stop"]
_WHATS: tuple[What, ...] = typing.get_args(What)  # of several at one step the last in this order is done
Phase = Literal["start", "join", "build", "data", "train", "evaluate", "save", "profile", "leave"]
PHASES: tuple[Phase, ...] = typing.get_args(Phase)  # in the order of a run's first ones
_NUMBERS = {name: number for number, name in enumerate(PHASES)}

Word: TypeAlias = memoryview  # of one 64-bit word, which is `word[0]`; all are 0 at first
_BYTES = 16384  # memory that nobody touches is never allocated
_NUM_WORDS = 64  # the packed record follows them
_NAP_SECONDS = 0.0002
_ANSWER_SECONDS = 600.0  # far longer than a live command takes to name a step, unless it is stopped


class Page:
    """The parts of one rank's page, at either end; the memory is freed with the last process that maps it."""

    def __init__(self, descriptor: int = -1) -> None:
        """Map the memory behind the descriptor, which the caller keeps; by default, memory of this process alone."""
        self._memory = mmap.mmap(descriptor, _BYTES)
        content = memoryview(self._memory)
        words = [content[at : at + 8].cast("Q") for at in range(0, 8 * _NUM_WORDS, 8)]
        record = content[8 * _NUM_WORDS :]
        self._views = [content, *words, record]
        # The layout. Words 0 to 15 are written by the rank, 16 to 47 by the command, the others by the rank: no cache
        # line, of eight words, has two writers.
        self.status = RankStatus(current_step=words[0], phase_number=words[1], heartbeats=words[2])
        self.agreements = Agreements(
            current_step=words[0],
            waits_for=words[3],
            waits_at=words[4],
            wish=words[5],
            newest=words[16],
            slots=[
                AgreementSlot(number=words[at], agreed=words[at + 1], profile=words[36 + slot])
                for slot, at in enumerate(range(17, 33, 2))
            ],
        )
        self.stop = StopRequest(signal=words[33], at_once=words[34])
        self.terminal = TerminalTurn(decision=words[35])
        self.collectives = CollectivesRecord(inquiry=words[48], num_bytes=words[49], content=record)

    @classmethod
    def make(cls) -> tuple[Page, int]:
        """Return a new page, and a descriptor for the rank."""
        descriptor = os.memfd_create("ddpexp-control")
        os.ftruncate(descriptor, _BYTES)
        return cls(descriptor), descriptor

    def close(self) -> None:
        """Unmap the page."""
        for view in self._views:
            view.release()
        self._memory.close()


@dataclass
class RankStatus:
    """Where the rank is: it writes, and its command reads."""

    current_step: Word  # from 1: the number of steps done, plus one; 0 before it is known
    phase_number: Word
    heartbeats: Word  # within a step

    @property
    def step(self) -> int | None:
        """Return the number of steps that the rank has done; None before it is known."""
        current = self.current_step[0]
        return current - 1 if current else None

    @step.setter
    def step(self, done: int) -> None:
        self.current_step[0] = done + 1

    @property
    def phase(self) -> Phase:
        """Return the rank's phase."""
        return PHASES[self.phase_number[0]]

    def set_phase(self, phase: Phase) -> None:
        """Publish the phase that this rank enters; costs 0.1 us. Ranks: any."""
        self.phase_number[0] = _NUMBERS[phase]

    def heartbeat(self) -> None:
        """Record progress within the phase; costs 0.1 us. Ranks: any."""
        self.heartbeats[0] += 1

    @property
    def progress(self) -> tuple[int, int, int]:
        """Return a value that changes whenever the rank makes progress."""
        return self.current_step[0], self.phase_number[0], self.heartbeats[0]


@dataclass
class AgreementSlot:
    """The step and the action of one agreement."""

    number: Word  # of the agreement; written last: it makes the other words valid
    agreed: Word  # its step and action
    profile: Word  # how many steps to profile


@dataclass
class Agreements:
    """The steps at which all ranks save, end or stop; see `ddpexp.launch.supervise.agreement`."""

    current_step: Word  # by the rank, see `RankStatus`
    waits_for: Word  # by the rank: the agreement whose step it waits for; written last: it makes the next word valid
    waits_at: Word  # by the rank: the step boundary where it waits
    wish: Word  # by rank zero: the agreement that it requests, and what for, unless that one does something anyway
    newest: Word  # by the command: the newest agreement; at their next boundary the ranks wait for its step
    slots: Sequence[AgreementSlot]  # by the command: the newest agreements

    def request(self, number: int, what: What) -> None:
        """Request this agreement. Ranks: zero."""
        self.wish[0] = _pack(number, _WHATS.index(what))

    @property
    def requested(self) -> tuple[int, What]:
        """Return the number of the agreement that rank zero requests, and what for; 0 for none."""
        number, what = _unpack(self.wish[0])
        return number, _WHATS[what]

    def begin(self, number: int) -> None:
        """Make the rank wait at its next step boundary for the step of this agreement."""
        self.newest[0] = number

    def bound(self, number: int) -> int:
        """Return the boundary where the rank waits for this agreement, or the latest one where it will.

        To be called a moment after `begin`, when the rank's next poll is sure to see it.
        """
        return self.waits_at[0] if self.waits_for[0] == number else self.current_step[0]

    def commit(self, number: int, step: int, what: What, profile: int = 0) -> None:
        """Publish the step of this agreement."""
        slot = self._slot(number)
        slot.agreed[0] = _pack(step, _WHATS.index(what))
        slot.profile[0] = profile
        slot.number[0] = number  # last

    def due(self, acted: int, done: int) -> tuple[int, What | None]:
        """Return the newest agreement for step `done`, and what all ranks do now; `acted` is the newest before.

        Waits until the step of the newest agreement is known.

        Raises:
            DdpexpError: an agreed step has passed, or the command does not publish one.
        """
        newest = self._wait_for_step(done)
        strongest = -1
        while acted < newest:
            slot = self._slot(acted + 1)
            step, what = _unpack(slot.agreed[0])
            if slot.number[0] != acted + 1 or step < done:
                raise DdpexpError(
                    f"after step {done} this rank learns of agreement {acted + 1}, which was for step {step}: "
                    "the ranks would diverge here",
                    suggestion="Please report this with the rank's log.",
                )
            if step > done:
                break
            acted += 1
            strongest = max(strongest, what)
        return acted, _WHATS[strongest] if strongest >= 0 else None

    def profile(self, before: int, acted: int) -> int:
        """Return how many steps to profile by the agreements after `before` up to `acted`, whatever else they are."""
        return max((self._slot(number).profile[0] for number in range(before + 1, acted + 1)), default=0)

    def _wait_for_step(self, done: int) -> int:
        """Wait until the newest agreement has its step, and return its number. They are committed in order."""
        begin = time.monotonic()
        while self._slot(newest := self.newest[0]).number[0] != newest:
            self.waits_at[0] = done
            self.waits_for[0] = newest  # last
            time.sleep(_NAP_SECONDS)
            if time.monotonic() - begin > _ANSWER_SECONDS:
                raise DdpexpError(
                    f"the command did not name the step to save at within {_ANSWER_SECONDS:g} s",
                    suggestion="Check whether the command is stopped.",
                )
        return newest

    def _slot(self, number: int) -> AgreementSlot:
        return self.slots[number % len(self.slots)]


@dataclass
class StopRequest:
    """Whether the run stops: the command writes, and the rank reads."""

    signal: Word  # the one that stops the run; 0 while none does
    at_once: Word  # 1: the rank is to exit at once when it gets SIGTERM

    def request(self, signal: int) -> None:
        """Publish the signal that stops the run."""
        self.signal[0] = signal

    @property
    def requested(self) -> bool:
        """Return whether a stop was requested; ranks may see it at different moments."""
        return self.signal[0] != 0

    def leave_at_once(self) -> None:
        """Make the rank exit at once on its next SIGTERM."""
        self.at_once[0] = 1

    @property
    def leaves_at_once(self) -> bool:
        """Return whether the rank is to exit at once on SIGTERM."""
        return self.at_once[0] != 0


@dataclass
class TerminalTurn:
    """Whether the rank gets the command's terminal: its requests are messages, which the command answers here."""

    decision: Word  # the number of the newest request that was answered, and 1 if it was granted

    def answer(self, number: int, granted: bool) -> None:
        """Answer a request of the rank."""
        self.decision[0] = _pack(number, granted)

    def is_granted(self, number: int) -> bool | None:
        """Return whether the rank's request was granted; None while it is not answered."""
        answered, granted = _unpack(self.decision[0])
        return granted == 1 if answered == number else None


@dataclass
class CollectivesRecord:
    """Which collectives the rank has called, for its command, which inquires by a message."""

    inquiry: Word  # the one that the rest answers; written last: it makes the rest valid
    num_bytes: Word
    content: memoryview  # the packed record

    def publish(self, number: int, record: Record) -> None:
        """Answer an inquiry; any thread of the rank may call this."""
        packed = pack(record, len(self.content))
        self.inquiry[0] = 0
        self.content[: len(packed)] = packed
        self.num_bytes[0] = len(packed)
        self.inquiry[0] = number  # last

    def packed(self, number: int) -> bytes | None:
        """Return the answer to an inquiry; None if there is none yet."""
        return bytes(self.content[: self.num_bytes[0]]) if self.inquiry[0] == number else None


def _pack(number: int, choice: int) -> int:
    """Return two values as one word; the choice is below 256."""
    return number << 8 | choice


def _unpack(word: int) -> tuple[int, int]:
    return word >> 8, word & 255
