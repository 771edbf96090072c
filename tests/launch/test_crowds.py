"""Thousands of commands: what each costs the one that leads must not grow with their number.

Work is counted, not timed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from ddpexp.errors import Failure, WorkerError
from ddpexp.launch import Layout, WorkerRequest
from ddpexp.launch.rendezvous.kinds import Fixed
from ddpexp.launch.rendezvous.meeting import lead
from ddpexp.launch.rendezvous.wire import Meeting, Peer
from ddpexp.launch.supervise import state, supervisor
from ddpexp.launch.supervise.assignment import assign_ranks
from ddpexp.launch.supervise.decider import Decider
from ddpexp.launch.supervise.messages import BeginAgreement, CommandDone, CommitStep, ReportBound
from ddpexp.launch.supervise.severity import Severity
from ddpexp.launch.supervise.worker import Worker
from ddpexp.launch.workers.lines import Lines
from ddpexp.launch.workers.page import Page
from ddpexp.launch.workers.rank_log import Log
from ddpexp.system.oom import Memory
from ddpexp.system.terminal import Terminal
from tests.bytecodes import count
from tests.launch.commands import Command

FEW, MANY = 32, 256


def work(call: Callable[[], object]) -> int:
    """Count the interpreter's operations in a call; what C does within one counts once."""
    return count(call).codes.total()


def handshake(index: int, size: int) -> dict[str, Any]:
    layout = Layout(nodes=1, world_size=1, device="cpu", backend="gloo", threads=1)
    return {
        "index": index, "size": size, "word": "", "host": f"node{index // 8}", "boot": "one", "versions": {},
        "owner": None,
        "identity": {"trainer": dict.fromkeys("abcdefgh", 1)}, "layout": asdict(layout), "workers": 1, "externally_launched": True,
        "local_rank": index % 8, "local_world_size": 8, "cores": [0, 1], "quota": None, "gpus": [],
    }  # fmt: skip


def test_who_comes_to_the_meeting_costs_the_same_however_many_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def a_command(size: int) -> float:
        way = Fixed("127.0.0.1", 0, ("port", "port"))
        listener, word = way.listen()
        monkeypatch.setattr(Fixed, "listen", lambda _: (listener, word))
        with ExitStack() as leaving:
            for index in range(1, size):
                channel = leaving.enter_context(socket.create_connection(listener.getsockname()))
                channel.sendall(json.dumps(handshake(index, size)).encode() + b"\n")
            met: list[Meeting] = []
            counted = work(lambda: met.append(lead(way, size, 30, "rank")[0]))
            met[0].close()
        monkeypatch.undo()
        return counted / size

    assert a_command(MANY) < 1.2 * a_command(FEW)


def test_a_participant_costs_the_same_however_many_there_are() -> None:
    def cost_of_a_participant(size: int) -> float:
        handshakes = [handshake(index, size) for index in range(size)]
        return work(lambda: assign_ranks(handshakes, "auto", "rank")) / size

    assert cost_of_a_participant(MANY) < 1.2 * cost_of_a_participant(FEW)


def test_an_answer_costs_an_agreement_the_same_however_many_commands_there_are() -> None:
    def an_answer(size: int) -> float:
        said: list[Any] = []
        with ExitStack() as stack:
            command = Command(stack, 0, 1, said.append, range(1, size))
            command.ranks[0].status.step = 0
            command.want("save")
            command.advance()
            assert said == [BeginAgreement(1)]

            def answers() -> None:
                for other in range(1, size):
                    assert said == [BeginAgreement(1)]
                    if other % 2:
                        command.on_message(ReportBound(1, other), other)
                    else:
                        command.on_message(CommandDone(), other)

            counted = work(answers)
        assert said[1] == CommitStep(1, size - 1, "save")
        return counted / size

    assert an_answer(MANY) < 1.2 * an_answer(FEW)


@dataclass
class Started:
    """A server whose one worker lives until it is let go."""

    channel: socket.socket
    theirs: socket.socket
    memory: Memory = field(default_factory=Memory)
    pid: int = os.getpid()

    def receive(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.channel.recv(1 << 16))
        return found

    def exit(self, code: int) -> None:
        self.theirs.send(json.dumps({"kind": "exit", "pid": os.getpid(), "code": code}).encode())

    def kill(self, signum: int, spared: int | None = None) -> None:
        self.exit(-signum)

    def lost(self) -> tuple[str, int | None]:
        raise AssertionError

    def destroy(self) -> None:
        raise AssertionError


class Watched:
    """The watch of a leading command with one worker and many other commands, none of which sends anything at first."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(supervisor, "_POLL_SECONDS", 0.001)
        self.sockets: list[socket.socket] = []
        self.server = Started(*self.pair(socket.SOCK_SEQPACKET))
        control, self.control = self.pair()
        signals, _ = self.pair()
        page, number = Page.make()
        os.close(number)
        self.worker = Worker(0, Lines(control), Log(None, 0), page, signals, pid=os.getpid())
        pairs = [self.pair() for _ in range(size)]
        self.meeting = Meeting(
            0, [Peer(index, ours, f"node{index}", 8 * index) for index, (ours, _) in enumerate(pairs, start=1)]
        )
        self.others = [theirs for _, theirs in pairs]

    def pair(self, kind: int = socket.SOCK_STREAM) -> tuple[socket.socket, socket.socket]:
        made = socket.socketpair(socket.AF_UNIX, kind)
        self.sockets += made
        return made

    def watch(self) -> int:
        return supervisor.Supervisor(self.server, [self.worker], Terminal(), self.meeting, WorkerRequest()).run()

    def part(self) -> None:
        """Let the worker and all other commands end well."""
        self.control.sendall(b'{"kind": "done"}\n')
        self.server.exit(0)
        for other in self.others:
            other.sendall(b'{"kind": "done"}\n')

    def close(self) -> None:
        for one in self.sockets:
            one.close()
        self.worker.log.close()
        self.worker.page.close()


def test_a_moment_without_news_costs_the_same_however_many_commands_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def moments(size: int, number: int) -> int:
        watched, looks = Watched(size, monkeypatch), 0

        def look(*_: object) -> None:
            nonlocal looks
            looks += 1
            if looks == number:
                watched.part()

        monkeypatch.setattr(Decider, "look_at_rank_zero", look)
        try:
            return work(watched.watch)
        finally:
            watched.close()

    def a_hundred(size: int) -> int:
        return moments(size, 110) - moments(size, 10)

    assert a_hundred(MANY) < 1.2 * a_hundred(FEW)


def test_a_failure_costs_the_same_a_command_however_many_report_theirs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def a_command(size: int) -> float:
        watched = Watched(size, monkeypatch)
        monkeypatch.setattr(state, "FAILURE_SECONDS", 0.0)
        for index, other in enumerate(watched.others, start=1):
            failure = Failure(index, f"node{index}", "RuntimeError", "gloo: connection closed", signal=signal.SIGKILL)
            severity = Severity.DEATH if index == 3 else Severity.DISCONNECTION
            message = {"kind": "failed", "failure": failure.as_dict(), "severity": severity}
            other.sendall(json.dumps(message).encode() + b'\n{"kind": "done"}\n')
        try:

            def fails() -> None:
                with pytest.raises(WorkerError) as failed:
                    watched.watch()
                assert failed.value.failure.rank == 3
                assert len(failed.value.others) == size

            return work(fails) / size
        finally:
            watched.close()

    assert a_command(MANY) < 1.2 * a_command(FEW)


def test_a_command_that_is_lost_is_named_by_its_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(4, monkeypatch)
    watched.others[2].close()
    for other in watched.others[:2] + watched.others[3:]:
        other.sendall(b'{"kind": "done"}\n')
    with pytest.raises(WorkerError) as failed:
        watched.watch()
    watched.close()
    assert (failed.value.failure.rank, failed.value.failure.host) == (24, "node3")
    assert failed.value.failure.message.startswith("the command of rank 24 on node3 is gone")
