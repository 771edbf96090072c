"""Decisions reach the ranks: real pages, logs and channels."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from ddpexp.launch.supervise.decider import Decider
from ddpexp.launch.supervise.events import COMMAND, HangFound, Signalled
from ddpexp.launch.supervise.inbox import Inbox
from ddpexp.launch.supervise.reports import Reports
from ddpexp.launch.workers.lines import Lines
from ddpexp.launch.workers.rank_log import Log
from tests.launch.commands import Command


@pytest.fixture
def command(stack: ExitStack) -> Command:
    """A command of two ranks that have done three steps."""
    command = Command(stack, 0, 2)
    command.poll(3)
    command.advance()
    return command


def test_ranks_see_that_a_stop_was_requested_before_they_come_to_its_step(command: Command) -> None:
    assert [rank.stop_requested for rank in command.ranks] == [False, False]
    command.decider.take(Signalled(signal.SIGTERM, COMMAND))
    assert [rank.stop_requested for rank in command.ranks] == [True, True]
    assert command.poll(4) == ["stop", "stop"]


class Counted:
    """A kernel that has killed for lack of memory; how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def verdict(self) -> str:
        self.asked += 1
        return "memory ran out"


@pytest.fixture
def reports(command: Command, stack: ExitStack) -> tuple[Reports, Counted, Callable[..., None]]:
    """The reader of the ranks, the kernel's count, and a function with which rank zero sends a message."""
    ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
    for worker in command.decider.workers:
        worker.log = Log(None, worker.rank)
        stack.callback(worker.log.close)
        worker.control = Lines(ours)
    memory: Any = Counted()

    def send(kind: str, **fields: Any) -> None:
        theirs.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    return Reports(command.decider, memory, Inbox(command.decider, None)), memory, send


def cause_of(decider: Decider, rank: int) -> tuple[str, str]:
    cause = decider.state.rank(rank).cause
    assert cause is not None
    return cause.kind, cause.message


def test_a_kill_by_the_kernel_is_explained_and_one_by_the_command_is_not(
    command: Command, reports: tuple[Reports, Counted, Any]
) -> None:
    read, memory, _ = reports
    worker, other = command.decider.workers
    read.on_exit(worker, -signal.SIGKILL)
    assert cause_of(command.decider, 0) == ("SIGKILL", "killed by SIGKILL: memory ran out")
    failure = command.decider.state.rank(0).cause
    assert failure is not None
    command.decider.take(HangFound(failure))  # the command kills the other rank
    read.on_exit(other, -signal.SIGKILL)
    assert cause_of(command.decider, 1) == ("Ended", "ended because another rank failed")
    assert memory.asked == 1


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("DataLoader worker (pid 3) is killed by signal: Killed. ", "(memory ran out)"),
        ("DataLoader worker (pid 3) is killed by signal: Aborted. ", "Aborted. "),
    ],
)
def test_the_kill_of_a_dataloader_worker_is_explained(
    command: Command, reports: tuple[Reports, Counted, Any], message: str, expected: str
) -> None:
    read, _, send = reports
    fields = {"host": "a", "error": "LoaderError", "traceback": None, "step": 3, "exit_code": 1}
    send("error", message=message, **fields)
    read.read(command.decider.workers[0])
    kind, text = cause_of(command.decider, 0)
    assert kind == "LoaderError"
    assert text.endswith(expected)


def test_the_last_messages_of_a_rank_count_before_its_end(
    command: Command, reports: tuple[Reports, Counted, Any]
) -> None:
    read, _, send = reports
    send("done")
    read.on_exit(command.decider.workers[0], 0)
    assert command.decider.state.rank(0).ended_well
