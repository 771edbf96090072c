"""The commands' part of the agreement on the step at which all ranks save or stop.

The leading command writes a new number on the pages of its ranks and has the other commands do so: from then on each
rank waits at its next boundary. Each command says which boundary none of its ranks can be past, the leading one names
the latest of them as the step, and all write it down. Ranks that are not there yet go on to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpexp.launch.workers.control import SharedStatus, What

_SEEN_SECONDS = (
    0.002  # from a number on the pages to all ranks' next looks seeing it: far more than the processor takes
)


@dataclass
class Agreement:
    """What this command knows of it; `send` speaks to the other commands.

    Of the leading one to all, else to that one.
    """

    pages: Sequence[SharedStatus]
    send: Callable[[Mapping[str, Any]], None]
    _stops: bool = False  # a stop has been asked for
    _number: int = 0  # of the newest agreement
    _what: What | None = None  # it is for, until it is settled
    _wanted: What | None = None
    _step: int = 0  # of the newest settled one
    _bound: int = 0  # the latest that a command has said of this one
    _awaited: set[int] = field(default_factory=set)  # the other commands that have not

    def want(self, what: What) -> None:
        """Have all ranks save, or save and stop: what comes after a stop is nothing new. For the leading command."""
        if not self._stops:
            self._wanted, self._stops = what, what == "stop"

    def advance(self, others: Collection[int]) -> None:
        """Go on as far as that needs no wait; `others` are the other commands that take part. For the leading command.

        Called with every message that comes, so it looks at the others only when an agreement begins.
        """
        first = self.pages[0]  # rank zero's
        if self._what is None:
            if self._wanted is None and not self._stops and first.wish > self._number:
                self._wanted = "save"
            if self._wanted is None or first.step is None:  # no rank may know before its first step where it began
                return
            self._what, self._wanted = self._wanted, None
            self._number += 1
            self.send({"kind": "begin", "number": self._number})
            self._awaited, self._bound = set(others), self._begin()
        if self._awaited:
            return
        # Never before an older one: a rank that has acted upon that has done its step, which is in the bounds.
        self._step = max(self._step, self._bound)
        self._settle(self._number, self._step, self._what)
        self.send({"kind": "settle", "number": self._number, "step": self._step, "what": self._what})
        self._what = None

    def forget(self, other: int) -> None:
        """Wait for another command no longer: it has ended."""
        self._awaited.discard(other)

    def hear(self, message: Mapping[str, Any], sender: int) -> None:
        """Take in what another command says of an agreement."""
        number = message["number"]
        if message["kind"] == "begin":
            self._number = number
            self.send({"kind": "bound", "number": number, "step": self._begin()})
        elif message["kind"] == "bound" and number == self._number:
            self._bound = max(self._bound, message["step"])
            self._awaited.discard(sender)
        elif message["kind"] == "settle":
            self._settle(number, message["step"], message["what"])

    def _begin(self) -> int:
        for status_page in self.pages:
            status_page.begin(self._number)
        time.sleep(_SEEN_SECONDS)
        return max(status_page.bound(self._number) for status_page in self.pages)

    def _settle(self, number: int, step: int, what: What) -> None:
        for status_page in self.pages:
            status_page.commit(number, step, what)
