"""What a command reports to the Python process that has started it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ddpexp.system import caller
from tests.conftest import PATIENCE, ROOT


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def environ(writing: int, live: bool = False) -> dict[str, str]:
    return {caller.VARIABLE: caller.variable(os.getpid(), writing, live)}


@pytest.mark.parametrize(
    "message",
    [
        caller.Ready(),
        caller.Directory("/x", is_sweep=True),
        caller.ProgressLine(3, 10, "loss 0.5"),
        caller.End("failed", "rank 1 failed", failure={"rank": 1, "traceback": None}),
    ],
)
def test_a_message_arrives_as_it_was_sent(pipe: tuple[int, int], message: caller.Message) -> None:
    assert caller.report(message, environ(pipe[1]))
    assert caller.parse(os.read(pipe[0], 4096)) == message


def test_a_command_without_a_caller_reports_nothing(pipe: tuple[int, int]) -> None:
    assert not caller.report(caller.Ready(), {})
    assert not caller.is_live({})
    assert not caller.report(caller.Ready(), {caller.VARIABLE: "x:y:z:"})


def test_who_asks_for_it_gets_the_progress(pipe: tuple[int, int]) -> None:
    assert caller.is_live(environ(pipe[1], live=True))
    assert not caller.is_live(environ(pipe[1], live=False))


def test_a_process_that_only_inherits_the_variable_reports_nothing(pipe: tuple[int, int]) -> None:
    """The number of the pipe is that of another file there."""
    variables = environ(pipe[1])
    other = os.pipe()
    try:
        moved = {caller.VARIABLE: variables[caller.VARIABLE].replace(f":{pipe[1]}:", f":{other[1]}:")}
        assert not caller.report(caller.Ready(), moved)
    finally:
        os.close(other[0])
        os.close(other[1])
    program = "from ddpexp.system import caller; caller.follow(); print(caller.report(caller.Ready()))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True,
        timeout=PATIENCE,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_caller_that_has_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    variables = environ(writing)
    os.close(reading)
    try:
        assert not caller.report(caller.Ready(), variables)
    finally:
        os.close(writing)


def test_secrets_and_long_tracebacks_stay_out(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "hunter2-hunter2")
    failure = {"rank": 0, "traceback": "x" * 50_000 + "hunter2-hunter2"}
    assert caller.report(caller.End("failed", "no hunter2-hunter2", failure=failure), environ(pipe[1]))
    text = os.read(pipe[0], 1 << 16).decode()
    assert "hunter2" not in text
    assert len(text) < 25_000


def test_the_path_that_the_caller_opens_is_as_it_is(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "hunter2-hunter2")
    assert caller.report(caller.Directory("/home/hunter2-hunter2/run"), environ(pipe[1]))
    assert b"/home/hunter2-hunter2/run" in os.read(pipe[0], 1 << 16)
