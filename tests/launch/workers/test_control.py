"""The channel between a worker and whoever watches it: whole messages, and never a wait that a terminal could cause."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ddpexp.launch.workers.control import CONTROL_FD, Control
from ddpexp.launch.workers.lines import Lines


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    lines, control = Lines(ends[0]), Control(ends[1])
    assert lines.read() == ([], True)
    control.send_nowait("phase", phase="train")
    control.send("error", message="line\nbreak and ünïcode")
    assert lines.read() == (
        [{"kind": "phase", "phase": "train"}, {"kind": "error", "message": "line\nbreak and ünïcode"}],
        True,
    )


def test_a_message_that_arrives_in_parts_is_put_together(ends: tuple[socket.socket, socket.socket]) -> None:
    lines = Lines(ends[0])
    ends[1].sendall(b'{"kind": "pha')
    assert lines.read() == ([], True)
    ends[1].sendall(b'se"}\n{"kind"')
    assert lines.read() == ([{"kind": "phase"}], True)


def test_the_end_of_the_other_side_is_reported_after_its_last_message(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    lines, control = Lines(ends[0]), Control(ends[1])
    control.send("done")
    ends[1].close()
    assert lines.read() == ([{"kind": "done"}], False)
    assert lines.read() == ([], False)


def test_progress_never_waits_for_a_watcher_that_does_not_read(ends: tuple[socket.socket, socket.socket]) -> None:
    lines, control = Lines(ends[0]), Control(ends[1])
    for number in range(20_000):
        control.send_nowait("progress", done=number, text="x" * 100)
    # What must arrive waits for room and comes whole, after what had room before it.
    teller = threading.Thread(target=control.send, args=("done",))
    teller.start()
    messages: list[dict[str, Any]] = []
    while not messages or messages[-1]["kind"] != "done":
        found, open_ = lines.read()
        assert open_
        messages += found
        time.sleep(0.001)
    teller.join()
    numbers = [message["done"] for message in messages[:-1]]
    assert numbers == list(range(len(numbers)))
    assert 100 < len(numbers) < 20_000


def test_a_watcher_that_is_gone_is_no_error(ends: tuple[socket.socket, socket.socket]) -> None:
    control = Control(ends[1])
    ends[0].close()
    control.send_nowait("progress", done=1)
    control.send("done")


def test_without_a_channel_every_message_is_dropped() -> None:
    control = Control.from_environ({})
    assert not control.watched
    control.send_nowait("progress", done=1)
    control.send("done")


def test_the_channel_is_found_through_the_environment(ends: tuple[socket.socket, socket.socket]) -> None:
    control = Control.from_environ({CONTROL_FD: str(ends[1].detach())})
    assert control.watched
    control.send("done")
    assert Lines(ends[0]).read()[0] == [{"kind": "done"}]
    assert control._channel is not None
    control._channel.close()
