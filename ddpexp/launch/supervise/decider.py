"""The state of a command's run, and the hands that perform what is decided; for the supervisor and launcher=inline."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpexp.launch.supervise import events
from ddpexp.launch.supervise.decide import decide
from ddpexp.launch.supervise.messages import PeerMessage
from ddpexp.launch.supervise.state import State
from ddpexp.launch.supervise.worker import Worker

_VISIBLE_SECONDS = 0.002  # for a number on the shared pages to be visible to all ranks: far more than a CPU takes


@dataclass
class Decider:
    """Takes events, and performs the actions on this command's workers; signals and kills in the caller's way."""

    state: State
    workers: Sequence[Worker]
    send: Callable[[PeerMessage], None]
    send_signal: Callable[[int, int | None], None]  # to all workers but the given process
    dismiss: Callable[[], None]  # makes the workers exit at once
    kill_workers: Callable[[], None]
    kill_server: Callable[[], None]
    show_last_output: Callable[[], None]
    committed: dict[int, int] = field(default_factory=dict)  # the steps of the agreements, by number
    _waiting: deque[events.Event] = field(default_factory=deque)
    _performs: bool = False

    def __post_init__(self) -> None:
        """Map each kind of action to what performs it."""
        self._perform: Mapping[type[events.Action], Callable[[Any], None]] = {
            events.Send: lambda action: self.send(action.message),
            events.BeginBoundary: lambda action: self._begin_boundary(action.number),
            events.CommitBoundary: self._commit_boundary,
            events.ShowStop: self._show_stop,
            events.DismissRanks: lambda _: self.dismiss(),
            events.KillRanks: lambda _: self.kill_workers(),
            events.KillServer: lambda _: self.kill_server(),
            events.DumpStacks: lambda action: self.dump(action.source),
            events.ShowLastOutput: lambda _: self.show_last_output(),
        }

    def take(self, event: events.Event) -> None:
        """Decide on an event and perform the actions; an event that an action causes waits for the other actions."""
        self._waiting.append(event)
        if self._performs:
            return
        self._performs = True
        try:
            while self._waiting:
                self.state, actions = decide(self.state, self._waiting.popleft(), time.monotonic())
                for action in actions:
                    self._perform[type(action)](action)
        finally:
            self._performs = False

    def look_at_rank_zero(self) -> None:
        """Take what rank zero, if it is here, has written to its page."""
        page = self.workers[0].page
        moved = (page.status.step is not None, page.agreements.requested)
        if moved != (self.state.rank_zero_has_stepped, self.state.wish) and self.workers[0].rank == 0:
            self.take(events.RankZeroMoved(*moved))

    def dump(self, source: int = events.COMMAND) -> None:
        """Make all ranks of this command dump their stacks; a rank that received the signal itself already has."""
        for worker in self.workers:
            worker.dumps += worker.rank != source
        spared = next((worker.pid for worker in self.workers if worker.rank == source), None)
        self.send_signal(signal.SIGQUIT, spared)

    def _show_stop(self, action: events.ShowStop) -> None:
        for worker in self.workers:
            worker.page.stop.request(action.signum)

    def _begin_boundary(self, number: int) -> None:
        pages = [worker.page for worker in self.workers]
        for page in pages:
            page.agreements.begin(number)
        time.sleep(_VISIBLE_SECONDS)
        self.take(events.BoundRead(number, max(page.agreements.bound(number) for page in pages)))

    def _commit_boundary(self, action: events.CommitBoundary) -> None:
        committed = action.committed
        self.committed[committed.number] = committed.step
        for worker in self.workers:
            worker.page.agreements.commit(committed.number, committed.step, committed.what, committed.profile)
