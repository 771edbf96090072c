"""Requests to a running run: what their files may say, and the answers of the leading command."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpexp.launch import requests
from ddpexp.launch.requests import Answer, Kind, Request
from ddpexp.launch.supervise import inbox as room
from ddpexp.launch.supervise import messages
from ddpexp.launch.supervise.inbox import Inbox
from tests.launch.commands import Command

Ask = Callable[..., Path]


@pytest.fixture
def command(stack: ExitStack) -> Command:
    return Command(stack, 0, 2)


@pytest.fixture
def inbox(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inbox:
    monkeypatch.setattr(room, "_LOOK_SECONDS", 0.0)
    return Inbox(command.decider, tmp_path / "requests")


@pytest.fixture
def ask(inbox: Inbox, tmp_path: Path) -> Ask:
    """A function that writes a request, and lets the command look at it."""

    def asked(kind: Kind, steps: int = 1) -> Path:
        path = tmp_path / f"requests/{len(list((tmp_path / 'requests').iterdir())):016x}.json"
        requests.write(path, Request(kind, steps))
        inbox.look()
        return path

    return asked


def answer(path: Path) -> Answer | None:
    return requests.read(path)[1]


def step(command: Command, done: int) -> list[Any]:
    found = command.poll(done)
    command.advance()
    return found


def test_a_profile_begins_after_the_same_step_everywhere_and_is_answered_when_it_is_written(
    command: Command, inbox: Inbox, ask: Ask
) -> None:
    step(command, 1)
    path = ask("profile", 5)
    assert answer(path) == Answer("agreed", 2)
    assert command.poll(2) == ["profile"] * 2
    assert [rank.profile_steps for rank in command.ranks] == [5, 5]
    inbox.on_profiled(messages.Profiled(0, 2, 0))  # of other steps
    assert answer(path) == Answer("agreed", 2)
    inbox.on_profiled(messages.Profiled(2, 7, 1))
    assert answer(path) == Answer("done", 2, 7, 1)
    assert command.poll(3) == [None, None]


def test_a_profile_that_is_done_before_anybody_looks_is_answered(command: Command, inbox: Inbox, ask: Ask) -> None:
    step(command, 1)
    command.decider.state = replace(command.decider.state, others=frozenset({1}))  # which reports its boundary later
    path = ask("profile", 1)
    assert answer(path) is None
    command.on_message(messages.ReportBound(1, 4), 1)
    inbox.on_profiled(messages.Profiled(4, 5, 0))
    assert answer(path) == Answer("done", 4, 5)


def test_several_requests_at_once_are_all_followed(command: Command, inbox: Inbox, ask: Ask, tmp_path: Path) -> None:
    step(command, 1)
    command.decider.state = replace(command.decider.state, others=frozenset({1}))
    paths = [ask("save"), ask("profile", 3), ask("save"), ask("profile", 2)]
    command.on_message(messages.ReportBound(1, 2), 1)
    command.advance()
    command.on_message(messages.ReportBound(2, 2), 1)
    inbox.look()
    assert [answer(path) for path in paths] == [
        Answer("done", 2), Answer("agreed", 2), Answer("done", 2), Answer("agreed", 2)
    ]  # fmt: skip
    assert command.poll(2) == ["save"] * 2
    assert [rank.profile_steps for rank in command.ranks] == [3, 3]


def test_before_the_first_step_there_is_nothing_to_save_or_profile(command: Command, inbox: Inbox, ask: Ask) -> None:
    path = ask("save")
    assert answer(path) == Answer("waits")
    step(command, 1)
    inbox.look()
    inbox.look()
    assert answer(path) == Answer("done", 2)
    assert command.poll(2) == ["save"] * 2


def test_a_stop_is_a_signals_and_names_itself(command: Command, inbox: Inbox, ask: Ask) -> None:
    step(command, 1)
    first = ask("stop")
    second, third = ask("stop"), ask("profile")
    assert command.poll(2) == ["stop"] * 2
    stop = command.decider.state.stop
    assert stop is not None
    assert (stop.signum, stop.by, stop.at_once) == (15, "stopped by ddpexp stop", False)
    assert answer(first) == answer(second) == Answer("agreed", 2)
    inbox.close()
    assert answer(first) == answer(second) == Answer("done", 2)
    assert answer(third) == Answer("ended", 2)  # nothing follows a stop


def test_a_stop_before_the_training_ends_at_once(command: Command, ask: Ask) -> None:
    assert answer(ask("stop")) == Answer("done")
    assert command.decider.state.stops_at_once


def test_stacks_are_written_at_once(command: Command, ask: Ask) -> None:
    assert answer(ask("stacks")) == Answer("done")
    assert [worker.dumps for worker in command.decider.workers] == [1, 1]


def test_the_folder_is_there_while_requests_are_taken(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "requests"
    folder.mkdir()
    old = folder / f"{0:016x}.json"
    requests.write(old, Request("stop"))  # of a command that was killed with an earlier start
    inbox = Inbox(command.decider, folder)
    inbox.look()
    assert not old.exists()
    assert command.decider.state.stop is None
    inbox.close()
    assert not folder.exists()


def test_a_command_that_does_not_lead_takes_none(stack: ExitStack, tmp_path: Path) -> None:
    inbox = Inbox(Command(stack, 2, 1).decider, tmp_path / "requests")
    inbox.look()
    inbox.close()
    assert not list(tmp_path.iterdir())


def test_what_is_no_request_is_ignored(command: Command, inbox: Inbox, tmp_path: Path) -> None:
    step(command, 1)
    folder, plain = tmp_path / "requests", tmp_path / "plain.json"
    requests.write(plain, Request("stop"))
    contents = [
        "", "[]", "{", "[" * 4000, json.dumps({"kind": "exec", "steps": 1}), json.dumps({"kind": "profile", "steps": 1e9}),
        json.dumps({"kind": "profile", "steps": True}), json.dumps({"kind": ["stop"]}),
        json.dumps({"kind": "stop", "answer": {"state": "done"}}), " " * 5000 + json.dumps({"kind": "stop"}),
    ]  # fmt: skip
    for number, content in enumerate(contents):
        (folder / f"{number:016x}.json").write_text(content)
    (folder / f"{100:016x}.json").symlink_to(plain)
    (folder / f"{101:016x}.json").mkdir()
    os.mkfifo(folder / f"{102:016x}.json")
    (folder / "stop.json").write_text(plain.read_text())
    inbox.look()
    assert command.decider.state.stop is None
    assert command.poll(2) == [None, None]


def test_somebody_elses_file_is_ignored(
    command: Command, inbox: Inbox, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(command, 1)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    if uid == 0:
        real = os.fstat
        monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result((*real(fd)[:4], 4711, *real(fd)[5:10])))
    path = ask("stop")
    assert command.decider.state.stop is None
    with pytest.raises(ValueError, match="not a file of this user"):
        requests.read(path)
    assert requests.read(path, uid or 4711) == (Request("stop"), None)  # as root reads the answer of another user's run
