"""Commands for tests of decisions and agreements: deciders with real pages, and ranks' own ends of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from ddpexp.launch.supervise import agreement, events
from ddpexp.launch.supervise.decider import Decider
from ddpexp.launch.supervise.messages import PeerMessage
from ddpexp.launch.supervise.state import Agreement, Rank, State
from ddpexp.launch.supervise.worker import Worker
from ddpexp.launch.workers.control import Control
from ddpexp.launch.workers.page import Page, What


class Command:
    """One command's decider, whose workers have nothing but a page, and the ranks' ends of the pages."""

    def __init__(
        self,
        stack: ExitStack,
        first_rank: int,
        size: int,
        send: Callable[[PeerMessage], None] = lambda _message: None,
        others: Sequence[int] = (),
    ) -> None:
        self.ranks: list[Control] = []
        nothing: Any = None
        workers = []
        for rank in range(first_rank, first_rank + size):
            page, descriptor = Page.make()
            stack.callback(os.close, descriptor)
            stack.callback(page.close)
            self.ranks.append(Control(None, page, leads=rank == 0))
            workers.append(Worker(rank, nothing, nothing, page, nothing))
        state = State(
            tuple(Rank(worker.rank) for worker in workers),
            first_rank=first_rank,
            leader_host=None if first_rank == 0 else "node0",
            others=frozenset(others),
        )
        nothing_done = [lambda *_: None] * 5
        self.decider = Decider(state, workers, send, *nothing_done)  # type: ignore[arg-type]

    @property
    def agreement(self) -> Agreement:
        return self.decider.state.agreement

    def want(self, what: What) -> None:
        """Request an agreement, as a signal does; `advance` begins it."""
        state = self.decider.state
        self.decider.state = replace(state, agreement=agreement.want(state.agreement, what))

    def advance(self) -> None:
        """Let a moment go by, in which the command looks at rank zero's page."""
        self.decider.look_at_rank_zero()
        self.decider.take(events.Tick())

    def on_message(self, message: Any, sender: int) -> None:
        self.decider.take(events.FromCommand(sender, message))

    def poll(self, step: int) -> list[What | None]:
        """Take all ranks over a step boundary; return what each does there."""
        return [rank.poll(step) for rank in self.ranks]
