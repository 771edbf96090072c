"""Which rank hangs: real processes that sleep, spin, are stopped or get no processor, watched.

As a command watches its ranks.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from ddpexp.errors import Failure
from ddpexp.launch.rendezvous.wire import Peer
from ddpexp.launch.supervise import watchdog
from ddpexp.launch.supervise.hangs import Account, verdict
from ddpexp.launch.supervise.messages import BeginInquiry, InquiryMessage, ReportAccounts
from ddpexp.launch.supervise.watchdog import Watchdog
from ddpexp.launch.supervise.worker import Worker
from ddpexp.launch.workers.collectives import Call, Group, Record
from ddpexp.launch.workers.control import Control
from ddpexp.launch.workers.lines import Lines
from ddpexp.launch.workers.page import Page, Phase
from ddpexp.launch.workers.rank_log import Log
from ddpexp.settings.trainer import Timeout

PROGRAM = """\
import faulthandler, signal, sys, time
faulthandler.register(signal.SIGQUIT, file=sys.stdout, all_threads=True)
print("ready", file=sys.stderr, flush=True)
def sleeps():
    while True:
        time.sleep(0.01)
def spins():
    while True:
        pass
def does_not_answer():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGQUIT, signal.SIGUSR1])
    print("blocked", file=sys.stderr, flush=True)
    signal.sigwait([signal.SIGUSR1])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGQUIT])
    sleeps()
globals()[sys.argv[1]]()
"""
LIMITS = Timeout(init_seconds=0.4, step_seconds=0.4, save_seconds=0.4, data_seconds=0.4)
LONG = 60.0  # only a watchdog that never decides takes as long


class Ranks:
    """Processes in place of ranks, and the watchdog of their command."""

    def __init__(self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(watchdog, "_LOOK_SECONDS", 0.02)
        monkeypatch.setattr(watchdog, "_STACK_SECONDS", 0.6)
        self.stack = stack
        self.processes: list[subprocess.Popen[str]] = []
        self.workers: list[Worker] = []
        self.ranks: list[Control] = []
        self.sent: list[InquiryMessage] = []
        self.request = 0
        self.before_dump: Callable[[], None] = lambda: None
        self.server = stack.enter_context(_started("sleeps"))
        self.watchdog = Watchdog(
            self.workers, LIMITS, True, self.sent.append, self.dump, lambda _: True, self.server.pid
        )

    def add(self, does: str, phase: Phase = "train", pinned: int | None = None) -> subprocess.Popen[str]:
        page, descriptor = Page.make()
        self.stack.callback(os.close, descriptor)
        log = Log(None, len(self.workers))
        self.stack.callback(log.close)
        process = self.stack.enter_context(_started(does, log.fileno(), pinned))
        ours, theirs = (self.stack.enter_context(one) for one in socket.socketpair())
        rank = Control(None, Page(descriptor))
        rank.status.step = 3
        rank.status.set_phase(phase)
        self.processes.append(process)
        self.ranks.append(rank)
        self.workers.append(Worker(len(self.workers), Lines(ours), log, page, theirs, process.pid))
        return process

    def dump(self) -> None:
        self.request += 1
        self.before_dump()
        for process in self.processes:
            process.send_signal(signal.SIGQUIT)

    def look(self, until: Callable[[], bool] = lambda: False) -> Failure | None:
        """Look again and again; return the cause when there is one, or None when `until` is true."""
        end = time.monotonic() + LONG
        while time.monotonic() < end:
            found = self.watchdog.look({})
            if found is not None or until():
                return found
            time.sleep(0.01)
        pytest.fail("the watchdog has come to no decision")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    with ExitStack() as stack:
        yield Ranks(stack, monkeypatch)


class _started:
    """A process that does as the program says, and is there."""

    def __init__(self, does: str, output: int = subprocess.DEVNULL, pinned: int | None = None) -> None:
        begin = None if pinned is None else lambda: os.sched_setaffinity(0, [pinned])
        command = [sys.executable, "-S", "-c", PROGRAM, does]
        self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True, preexec_fn=begin)
        assert self.process.stderr is not None
        for line in ("ready", "blocked") if does == "does_not_answer" else ("ready",):
            assert self.process.stderr.readline().strip() == line

    def __enter__(self) -> subprocess.Popen[str]:
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize(("does", "says"), [("sleeps", "it waits in sleeps"), ("spins", "it is busy in spins")])
def test_a_rank_that_makes_no_progress_is_named_with_where_it_is(ranks: Ranks, does: str, says: str) -> None:
    ranks.add(does)
    found = ranks.look()
    assert found is not None
    assert (found.rank, found.step, found.phase, found.kind) == (0, 3, "train", "Hang")
    assert says in found.message
    assert f"in {does}" in (found.traceback or "")


def test_a_rank_that_makes_progress_is_not_asked_for_its_stack(ranks: Ranks) -> None:
    ranks.add("sleeps")
    end = time.monotonic() + 5 * LIMITS.step_seconds

    def beats() -> bool:
        ranks.ranks[0].status.heartbeat()
        return time.monotonic() > end

    assert ranks.look(until=beats) is None
    assert ranks.request == 0


@pytest.mark.variants(1)
@pytest.mark.parametrize("how", ["a step", "a beat", "a phase"])
def test_a_stack_counts_only_if_the_rank_has_not_moved_since_it_was_asked(ranks: Ranks, how: str) -> None:
    """A rank that comes further while its stack is written is not ended, however long it was silent before."""
    ranks.add("sleeps")
    rank = ranks.ranks[0]

    def moves() -> None:
        if ranks.request > 2:
            return
        if how == "a step":
            rank.status.step = 10 + ranks.request
        elif how == "a beat":
            rank.status.heartbeat()
        else:
            rank.status.set_phase("save" if ranks.request == 1 else "train")

    ranks.before_dump = moves
    found = ranks.look()
    assert ranks.request == 3
    assert found is not None
    assert found.step == (12 if how == "a step" else 3)


def test_an_answer_to_an_earlier_question_does_not_count(ranks: Ranks) -> None:
    """Asked while it started, a rank answers when it is asked again much later: nobody knows to which question."""
    process = ranks.add("does_not_answer", "start")
    rank = ranks.ranks[0]
    assert ranks.look(until=lambda: ranks.request == 1 and not ranks.watchdog.writes_stacks) is None
    rank.status.set_phase("evaluate")
    ranks.before_dump = lambda: process.send_signal(signal.SIGUSR1)
    found = ranks.look()
    assert ranks.request == 3  # the second answer may be the first question's
    assert found is not None
    assert (found.phase, "it waits in sleeps" in found.message) == ("evaluate", True)


def test_a_rank_that_does_not_answer_is_asked_twice(ranks: Ranks) -> None:
    ranks.add("does_not_answer")
    found = ranks.look()
    assert ranks.request == 2
    assert found is not None
    assert "does not answer at all" in found.message


@pytest.mark.slow
def test_a_rank_that_waits_for_a_processor_is_not_silent(ranks: Ranks) -> None:
    """Nine processes share one core: most of the time that passes is not the rank's."""
    core = min(os.sched_getaffinity(0))
    ranks.add("spins", pinned=core)
    for _ in range(8):
        ranks.stack.enter_context(_started("spins", pinned=core))
    ranks.watchdog.timeout = Timeout(init_seconds=600, step_seconds=600, save_seconds=600, data_seconds=600)
    begin = time.monotonic()
    assert ranks.look(until=lambda: time.monotonic() > begin + 3) is None
    [seen] = ranks.watchdog._silences.values()
    assert 0 < seen.seconds < 0.6 * (time.monotonic() - begin)


def test_a_stopped_fork_server_is_named_where_a_rank_cannot_report(ranks: Ranks) -> None:
    ranks.add("does_not_answer")
    ranks.add("does_not_answer")
    ranks.server.send_signal(signal.SIGSTOP)
    found = ranks.look()
    assert found is not None
    assert (
        f"the fork server of its host, process {ranks.server.pid}, is stopped (by SIGSTOP or a debugger)"
        in found.message
    )


def test_a_stopped_rank_is_named_before_its_stopped_server(ranks: Ranks) -> None:
    ranks.add("sleeps")
    ranks.add("sleeps").send_signal(signal.SIGSTOP)
    ranks.server.send_signal(signal.SIGSTOP)
    found = ranks.look()
    assert found is not None
    assert found.rank == 1
    assert f"its process {ranks.processes[1].pid} is stopped" in found.message


def test_what_another_command_saw_for_an_earlier_inquiry_does_not_count(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_ANSWER_SECONDS", 600.0)
    ranks.add("sleeps")
    ours, theirs = (ranks.stack.enter_context(one) for one in socket.socketpair())
    other = {1: Peer(1, ours, "b", 1)}
    account = Account(1, "b", 1, "train", 2, 9.0, 0.4, "step_seconds", "asleep", "in late (late.py:1)")
    end = time.monotonic() + LONG
    while not (ranks.request and not ranks.watchdog.writes_stacks):
        assert ranks.watchdog.look(other) is None
        assert time.monotonic() < end
        time.sleep(0.01)
    [inquiry] = ranks.sent
    assert isinstance(inquiry, BeginInquiry)
    ranks.watchdog.on_message(ReportAccounts(inquiry.number - 1, [account]), 1)
    assert ranks.watchdog.look(other) is None
    ranks.watchdog.on_message(ReportAccounts(inquiry.number, [account]), 1)
    found = ranks.watchdog.look(other)
    assert found is not None
    assert found.rank == 1
    assert theirs.fileno() > 0


def test_with_nccl_the_ranks_are_also_asked_what_they_have_called(ranks: Ranks) -> None:
    ranks.watchdog.uses_nccl = ranks.watchdog.on_gpus = True
    ranks.add("spins")
    ranks.add("spins")
    call = Call("all_reduce", "Float[10]", 10, "scheduled")
    done = Group("0", "default_pg", (0, 1), 6, 6, {})
    waits = replace(done, enqueued=7, calls={7: call})

    def answer() -> None:  # the inquiry was sent before the stacks were asked for
        for worker, group in zip(ranks.workers, (done, waits), strict=True):
            worker.page.collectives.publish(ranks.request, Record([group]))

    ranks.before_dump = answer
    found = ranks.look()
    assert found is not None
    assert found.rank == 0
    assert "rank 0 has not called all_reduce number 7 of the default process group (Float[10])" in found.message
    assert "; rank 0 is in spins" in found.message


def test_ranks_that_do_not_answer_what_they_have_called_delay_nothing_for_long(ranks: Ranks) -> None:
    ranks.watchdog.uses_nccl = True
    ranks.add("spins")
    found = ranks.look()
    assert found is not None
    assert "it is busy in spins" in found.message


def account(rank: int, how: Any, silent: float = 9.0, step: int = 3) -> Account:
    return Account(rank, "a", 100 + rank, "train", step, silent, 1.0, "step_seconds", how, f"in f{rank} (a.py:{rank})")


@pytest.mark.parametrize(
    ("accounts", "rank"),
    [
        ([account(0, "waits"), account(1, "asleep")], 1),
        ([account(0, "waits"), account(1, "busy")], 1),
        ([account(0, "waits"), account(1, "stopped", silent=0.1)], 1),
        ([account(0, "mute"), account(1, "asleep")], 0),
        ([account(0, "orphaned"), account(1, "stopped")], 1),
        ([account(0, "waits"), account(1, "orphaned")], 1),
        ([account(0, "waits", step=4), account(1, "waits", step=3)], 1),
        ([account(0, "waits"), account(1, "asleep", silent=0.5)], None),  # its time is not up
        ([account(0, "asleep", silent=0.5), account(1, "asleep", silent=0.9)], None),
        ([], None),
    ],
)
def test_the_rank_for_which_the_others_wait_is_the_cause(accounts: list[Account], rank: int | None) -> None:
    found = verdict(accounts)
    assert (None if found is None else found.rank) == rank


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("step_seconds", "Do all take the same path through the recipe?"),
        ("init_seconds", "Can they reach one another over the network? ddpexp doctor measures it."),
    ],
)
def test_ranks_that_all_wait_get_advice_on_what_they_do(key: str, advice: str) -> None:
    found = verdict([replace(account(rank, "waits"), key=key) for rank in (0, 1)])
    assert found is not None
    assert found.message.endswith(advice)
