"""The step at which all ranks save or stop.

Several commands' agreements wired together, with real pages and ranks' own ends.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import pytest

from ddpexp.errors import Failure
from ddpexp.launch.supervise.events import CommandLost
from ddpexp.launch.supervise.messages import BeginAgreement, CommandDone, CommitStep, PeerMessage, ReportBound
from ddpexp.launch.workers.control import Control
from ddpexp.launch.workers.page import What
from tests.conftest import PATIENCE
from tests.launch.commands import Command


class Commands:
    """Commands of some ranks each; the first one leads. What they send waits until a test has it delivered."""

    def __init__(self, stack: ExitStack, sizes: Sequence[int]) -> None:
        self.sent: list[PeerMessage] = []  # by the leading command, once for all
        self._mail: dict[tuple[int, int], deque[PeerMessage]] = {}  # by sender and receiver: a link keeps its order
        self.commands: list[Command] = []
        for number, size in enumerate(sizes):
            others = range(1, len(sizes)) if number == 0 else [0]
            self.commands.append(Command(stack, len(self.ranks), size, partial(self._send, number), others))
        self.lead = self.commands[0]

    @property
    def ranks(self) -> list[Control]:
        return [rank for command in self.commands for rank in command.ranks]

    def _send(self, sender: int, message: PeerMessage) -> None:
        if sender == 0:
            self.sent.append(message)
        for receiver in range(1, len(self.commands)) if sender == 0 else [0]:
            self._mail.setdefault((sender, receiver), deque()).append(message)

    def at(self, *steps: int) -> None:
        """Have each rank have done so many steps, and be in the next one."""
        for rank, done in zip(self.ranks, steps, strict=True):
            rank.status.step = done

    def advance(self) -> None:
        self.lead.advance()

    def forget(self, number: int) -> None:
        """Have the leading command lose another one, after that has said that it is done."""
        self.lead.on_message(CommandDone(), number)
        failure = Failure(rank=number, host="there", kind="CommandLost", message="gone")
        self.lead.decider.take(CommandLost(number, failure))

    def deliver(self, sender: int, receiver: int) -> None:
        """Deliver the next message of a link, and have the leading command look, as its watch does."""
        self.commands[receiver].on_message(self._mail[sender, receiver].popleft(), sender)
        if receiver == 0:
            self.advance()

    def deliver_all(self, order: random.Random) -> None:
        """Deliver all messages, the links in any order."""
        for _ in range(100):
            links = [link for link, waiting in self._mail.items() if waiting]
            if not links:
                return
            self.deliver(*order.choice(links))
        pytest.fail("the commands talk without an end")

    def polls(self, rank: int, first: int, last: int) -> dict[int, What]:
        """Take a rank over some boundaries; return where it did what."""
        found = {done: self.ranks[rank].poll(done) for done in range(first, last + 1)}
        return {done: what for done, what in found.items() if what is not None}

    def agreed(self) -> list[tuple[int, int, str]]:
        """Return the agreements that the leading command has named a step for."""
        return [(one.number, one.step, one.what) for one in self.sent if isinstance(one, CommitStep)]


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setattr(
        "ddpexp.launch.workers.page._ANSWER_SECONDS", 5.0
    )  # ten minutes, for a command that somebody has stopped
    with ExitStack() as stack:
        yield stack


def test_alone_all_ranks_save_at_the_first_boundary_that_none_has_passed(stack: ExitStack) -> None:
    alone = Commands(stack, [2])
    alone.at(3, 5)
    alone.lead.want("save")
    alone.advance()
    assert alone.agreed() == [(1, 6, "save")]
    assert alone.polls(0, 4, 9) == {6: "save"}
    assert alone.polls(1, 6, 9) == {6: "save"}
    alone.advance()
    assert [type(message) for message in alone.sent] == [BeginAgreement, CommitStep]  # once


def test_nothing_is_agreed_on_before_rank_zero_knows_where_it_began(stack: ExitStack) -> None:
    alone = Commands(stack, [1])
    alone.lead.want("stop")
    alone.advance()
    assert alone.sent == []
    alone.at(0)
    alone.advance()
    assert alone.agreed() == [(1, 1, "stop")]
    assert alone.polls(0, 1, 1) == {1: "stop"}


def test_without_a_request_there_is_no_agreement(stack: ExitStack) -> None:
    both = Commands(stack, [1, 1])
    both.at(3, 3)
    both.advance()
    assert both.sent == []


@pytest.mark.parametrize("seed", range(12))
def test_all_commands_save_at_the_latest_bound_in_whatever_order_messages_arrive(stack: ExitStack, seed: int) -> None:
    order = random.Random(seed)
    three = Commands(stack, [2, 1, 2])
    expected = []
    step = 0
    for number, what in enumerate(("save", "stop"), start=1):
        steps = [step + order.randrange(5) for _ in three.ranks]
        three.at(*steps)
        three.lead.want(what)  # type: ignore[arg-type]
        three.advance()
        three.deliver_all(order)
        step = max(steps) + 1
        expected.append((number, step, what))
        for rank, done in enumerate(steps):
            assert three.polls(rank, done + 1, step) == {step: what}
    assert three.agreed() == expected


def test_a_rank_that_waits_at_a_boundary_is_bound_by_that_one(stack: ExitStack) -> None:
    both = Commands(stack, [1, 1])
    both.at(2, 4)
    both.lead.want("save")
    both.advance()
    waiting = threading.Thread(
        target=both.ranks[0].poll, args=(3,), daemon=True
    )  # it has come to the next boundary meanwhile, and waits
    waiting.start()
    both.deliver(0, 1)
    assert both.agreed() == []  # the other's bound is on its way
    assert waiting.is_alive()
    both.deliver(1, 0)
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    both.deliver(0, 1)
    assert both.agreed() == [(1, 5, "save")]
    assert both.polls(0, 4, 7) == both.polls(1, 5, 7) == {5: "save"}


def test_the_step_waits_for_every_command_that_takes_part(stack: ExitStack) -> None:
    three = Commands(stack, [1, 1, 1])
    three.at(1, 2, 8)
    three.lead.want("save")
    three.advance()
    for number in (1, 2):
        three.deliver(0, number)
    three.deliver(2, 0)
    assert three.agreed() == []
    three.deliver(1, 0)
    assert three.agreed() == [(1, 9, "save")]


def test_a_command_that_ends_in_the_middle_is_not_waited_for(stack: ExitStack) -> None:
    three = Commands(stack, [1, 1, 1])
    three.at(1, 2, 8)
    three.lead.want("save")
    three.advance()
    three.deliver(0, 1)
    three.deliver(1, 0)
    assert three.agreed() == []
    three.forget(2)
    three.forget(2)  # its end may be noticed twice
    three.advance()
    assert three.agreed() == [(1, 3, "save")]


def test_no_step_is_before_an_older_ones(stack: ExitStack) -> None:
    both = Commands(stack, [1, 1])
    both.at(1, 8)
    both.lead.want("save")
    both.advance()
    both.deliver_all(random.Random(0))
    assert both.agreed() == [(1, 9, "save")]
    both.lead.want("stop")  # the one who was at step 9 has ended, and rank zero has not come there yet
    both.forget(1)
    both.advance()
    assert both.agreed() == [(1, 9, "save"), (2, 9, "stop")]
    assert both.polls(0, 2, 9) == {9: "stop"}


def test_a_late_message_about_an_older_agreement_is_ignored(stack: ExitStack) -> None:
    three = Commands(stack, [1, 1, 1])
    three.at(1, 2, 3)
    three.lead.want("save")
    three.advance()
    three.deliver(0, 1)
    three.deliver(1, 0)
    three.forget(2)
    three.advance()
    three.lead.want("stop")
    three.advance()
    three.lead.on_message(ReportBound(1, 70), 2)  # of the one before
    three.lead.on_message(ReportBound(1, 70), 1)
    three.advance()
    assert three.agreed() == [(1, 3, "save")]
    for link in ((0, 1), (0, 1), (1, 0)):
        three.deliver(*link)
    assert three.agreed() == [(1, 3, "save"), (2, 3, "stop")]


def test_what_comes_after_a_stop_is_nothing_new(stack: ExitStack) -> None:
    alone = Commands(stack, [1])
    alone.at(2)
    alone.lead.want("stop")
    alone.advance()
    for what in ("save", "stop"):
        alone.lead.want(what)
        alone.advance()
    assert alone.agreed() == [(1, 3, "stop")]
    assert alone.ranks[0].poll(3, save=True) == "stop"
    assert alone.ranks[0].poll(4, save=True) is None
    alone.advance()
    assert len(alone.agreed()) == 1  # nor is rank zero's request


def test_a_stop_while_a_save_is_on_its_way_comes_after_it(stack: ExitStack) -> None:
    both = Commands(stack, [1, 1])
    both.at(2, 4)
    both.lead.want("save")
    both.advance()
    both.lead.want("stop")
    both.advance()
    assert [type(message) for message in both.sent] == [BeginAgreement]  # one at a time
    both.deliver_all(random.Random(0))
    both.advance()
    both.deliver_all(random.Random(0))
    assert both.agreed() == [(1, 5, "save"), (2, 5, "stop")]
    assert both.polls(0, 3, 6) == both.polls(1, 5, 6) == {5: "stop"}  # both at once, of which the stop saves anyway


def test_a_stop_requested_before_a_save_has_begun_replaces_it(stack: ExitStack) -> None:
    alone = Commands(stack, [1])
    alone.lead.want("save")
    alone.lead.want("stop")
    alone.at(0)
    alone.advance()
    alone.advance()
    assert alone.agreed() == [(1, 1, "stop")]


def test_rank_zeros_wish_is_a_save_and_no_other_ranks_is(stack: ExitStack) -> None:
    both = Commands(stack, [2, 1])
    both.at(2, 2, 2)
    for rank in (1, 2):
        assert both.ranks[rank].poll(2, save=True) is None
    both.advance()
    assert both.sent == []
    assert both.ranks[0].poll(2, save=True) is None
    both.advance()
    both.deliver_all(random.Random(0))
    assert both.agreed() == [(1, 3, "save")]
    both.advance()  # the wish is fulfilled, though no rank has come there
    assert len(both.agreed()) == 1
    assert [both.polls(rank, 3, 4) for rank in range(3)] == [{3: "save"}] * 3
    both.ranks[0].poll(5, save=True)
    both.advance()
    both.deliver_all(random.Random(0))
    assert both.agreed()[1:] == [(2, 6, "save")]


def test_rank_zero_may_want_the_end_which_all_reach_at_one_step_and_a_stop_comes_first(stack: ExitStack) -> None:
    both = Commands(stack, [2, 1])
    both.at(2, 3, 2)
    assert both.ranks[1].poll(3, end=True) is None  # counts from rank zero alone
    both.advance()
    assert both.sent == []
    assert both.ranks[0].poll(2, save=True, end=True) is None
    both.advance()
    both.deliver_all(random.Random(0))
    assert both.agreed() == [(1, 4, "end")]
    both.lead.want("stop")
    both.advance()
    both.deliver_all(random.Random(0))
    assert both.agreed()[1:] == [(2, 4, "stop")]
    assert [both.polls(rank, 4, 4) for rank in range(3)] == [{4: "stop"}] * 3


def test_a_save_and_an_end_at_one_step_are_an_end(stack: ExitStack) -> None:
    alone = Commands(stack, [1])
    alone.at(5)
    alone.lead.want("save")
    alone.advance()
    alone.advance()
    alone.ranks[0].status.step = 5
    assert alone.ranks[0].poll(5, end=True) is None  # is the save's number, so the wish is repeated after it
    alone.advance()
    assert alone.agreed() == [(1, 6, "save")]
    assert alone.ranks[0].poll(6, end=True) == "save"
    assert alone.ranks[0].poll(7, end=True) is None
    alone.advance()
    assert alone.ranks[0].poll(8, end=True) == "end"


def test_ranks_of_different_pace_all_act_at_the_same_steps(stack: ExitStack) -> None:
    three = Commands(stack, [2, 1, 2])
    three.at(*[0] * 5)
    acted: list[list[tuple[int, What]]] = [[] for _ in three.ranks]

    def train(rank: int) -> None:
        pause, done = threading.Event(), 0
        while not acted[rank] or acted[rank][-1][1] != "stop":
            pause.wait(0.0003 * (rank + 1))
            done += 1
            what = three.ranks[rank].poll(done, save=done == 20)
            if what is not None:
                acted[rank].append((done, what))

    threads = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in range(5)]
    for thread in threads:
        thread.start()
    order = random.Random(0)
    for what in ("save", "save", "save", "stop"):
        before = len(three.agreed())
        three.lead.want(what)
        deadline = time.monotonic() + PATIENCE
        while len(three.agreed()) == before or three.agreed()[-1][2] != what:
            assert time.monotonic() < deadline
            three.advance()
            three.deliver_all(order)
    three.deliver_all(order)
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert all(one == acted[0] for one in acted)
    assert acted[0][-1][1] == "stop"
