"""The commands' part of the agreement on the step at which all ranks save, end or stop; used by the supervisor.

The leading command writes a new agreement number to the shared pages of its ranks, and the other commands do the same:
from then on each rank waits at its next step boundary. Each command reports the boundary that none of its ranks can be
past, the leading one chooses the latest of them as the step, and all publish it. Ranks that have not reached it
continue up to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from ddpexp.launch.supervise.messages import AgreementMessage, BeginAgreement, CommitStep, ReportBound
from ddpexp.launch.workers.page import Page, What

_VISIBLE_SECONDS = 0.002  # for a number on the shared pages to be visible to all ranks: far more than a CPU takes


@dataclass
class Agreement:
    """One command's state of it; `send` sends to all other commands from the leading one, else to the leading one."""

    pages: Sequence[Page]
    send: Callable[[AgreementMessage], None]
    _stops: bool = False  # a stop was requested
    _number: int = 0  # of the newest agreement
    _what: What | None = None  # what the agreement in progress is for
    _requested: What | None = None
    _step: int = 0  # of the newest committed agreement
    _bound: int = 0  # the latest boundary reported for the agreement in progress
    _awaited: set[int] = field(default_factory=set)  # the other commands that have not reported theirs

    def want(self, what: What) -> None:
        """Request that all ranks save, or save and stop; ignored after a stop. For the leading command."""
        if not self._stops:
            self._requested, self._stops = what, what == "stop"

    def advance(self, others: Collection[int]) -> None:
        """Advance as far as possible without waiting; `others` are the other commands. For the leading command.

        Called on every message, so it iterates over the others only when an agreement begins.
        """
        first = self.pages[0]  # rank zero's
        if self._what is None:
            number, wish = first.agreements.requested
            if self._requested is None and not self._stops and number > self._number:
                self._requested = wish
            # Before its first step a rank may not know its position.
            if self._requested is None or first.status.step is None:
                return
            self._what, self._requested = self._requested, None
            self._number += 1
            self.send(BeginAgreement(self._number))
            self._awaited, self._bound = set(others), self._begin()
        if self._awaited:
            return
        # Never before an older agreement's step: a rank that acted on it has done that step, so the bounds include it.
        self._step = max(self._step, self._bound)
        committed = CommitStep(self._number, self._step, self._what)
        self._commit(committed)
        self.send(committed)
        self._what = None

    def forget(self, other: int) -> None:
        """Stop waiting for another command: it has ended."""
        self._awaited.discard(other)

    def on_message(self, message: AgreementMessage, sender: int) -> None:
        """Handle a message of another command."""
        if isinstance(message, BeginAgreement):
            self._number = message.number
            self.send(ReportBound(message.number, self._begin()))
        elif isinstance(message, CommitStep):
            self._commit(message)
        elif message.number == self._number:
            self._bound = max(self._bound, message.step)
            self._awaited.discard(sender)

    def _begin(self) -> int:
        for page in self.pages:
            page.agreements.begin(self._number)
        time.sleep(_VISIBLE_SECONDS)
        return max(page.agreements.bound(self._number) for page in self.pages)

    def _commit(self, committed: CommitStep) -> None:
        for page in self.pages:
            page.agreements.commit(committed.number, committed.step, committed.what)
