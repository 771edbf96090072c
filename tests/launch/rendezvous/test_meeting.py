"""How the commands of a job find one another: any order, with strangers connecting, and never without an end."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ddpexp.errors import AbsentError, RefusedError
from ddpexp.launch.rendezvous import meeting, wire
from ddpexp.launch.rendezvous.kinds import Fixed, Named, Published, Rendezvous, StoreRendezvous, by_key
from ddpexp.launch.rendezvous.meeting import join, lead
from ddpexp.launch.rendezvous.wire import Meeting
from tests.conftest import PATIENCE, ROOT
from tests.points import wait_for
from tests.refusals import is_about, refused

LOOPBACK = "127.0.0.1"
NAMES = ("launcher.master_addr", "launcher.master_port")
Found = tuple[Meeting, list[dict[str, Any]]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def handshake(index: int, size: int = 2, **more: Any) -> dict[str, Any]:
    return {"index": index, "size": size, "host": f"host{index}", **more}


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=16) as pool:
        yield pool


def by_store() -> StoreRendezvous:
    store: list[str] = []
    return StoreRendezvous(publish=store.append, ask=lambda: store[-1] if store else None, local=True)


def ways(folder: Path) -> dict[str, Rendezvous]:
    return {
        "fixed": Fixed(LOOPBACK, free_port(), NAMES),
        "named": Named.after(str(folder)),
        "published": Published(folder / "meeting"),
        "by_store": by_store(),
    }


@pytest.fixture(params=["fixed", "named", "published", "by_store"])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Rendezvous:
    return ways(tmp_path)[request.param]


@pytest.fixture
def fixed() -> Fixed:
    return Fixed(LOOPBACK, free_port(), NAMES)


def end(meetings: Sequence[Meeting]) -> None:
    for one in meetings:
        one.close()


def refusal(future: Future[Any]) -> str:
    error = future.exception(PATIENCE)
    assert isinstance(error, RefusedError), error
    return str(error)


# ---------------------------------------------------------------------------------------------------- who comes when


@pytest.mark.variants(4)
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_the_order_of_arrival_does_not_matter(
    way: Rendezvous, background: ThreadPoolExecutor, order: list[int]
) -> None:
    leading: Future[Found] | None = None
    joining: dict[int, Future[Meeting]] = {}
    for index in order:
        if index == 0:
            leading = background.submit(lead, way, 4, PATIENCE, "rank")
        else:
            joining[index] = background.submit(join, way, handshake(index, 4, note=f"from {index}"), PATIENCE, "rank")
        time.sleep(0.15)
    assert leading is not None
    found, handshakes = leading.result(PATIENCE)
    others = [joining[index].result(PATIENCE) for index in (1, 2, 3)]
    assert [one["note"] for one in handshakes] == ["from 1", "from 2", "from 3"]
    assert [(peer.index, peer.host) for peer in found.peers] == [(1, "host1"), (2, "host2"), (3, "host3")]
    assert (found.leads, [one.leads for one in others]) == (True, [False] * 3)
    # Each connection goes where it should, both ways.
    for peer, other in zip(found.peers, others, strict=True):
        peer.send({"kind": "for", "index": peer.index})
        [leader] = other.peers
        assert leader.receive(time.monotonic() + PATIENCE) == {"kind": "for", "index": other.index}
        assert leader.host == socket.gethostname()
        leader.send({"kind": "from", "index": other.index})
        assert peer.receive(time.monotonic() + PATIENCE) == {"kind": "from", "index": other.index}
    end([found, *others])


OTHER = """\
import json, sys, time
from pathlib import Path
from ddpexp.launch.rendezvous.kinds import Published
from ddpexp.launch.rendezvous.meeting import join
path, index = sys.argv[1:]
met = join(Published(Path(path)), {"index": int(index), "size": 5, "host": "other"}, 600, "rank")
print(json.dumps(met.peers[0].receive(time.monotonic() + 600)))
"""


def test_other_processes_meet_a_late_leader_through_a_file(tmp_path: Path) -> None:
    way = Published(tmp_path / "meeting")
    command = [sys.executable, "-c", OTHER, str(way.path)]
    others = [
        subprocess.Popen([*command, str(index)], stdout=subprocess.PIPE, text=True, cwd=ROOT) for index in range(1, 5)
    ]
    time.sleep(0.5)
    found, _ = lead(way, 5, PATIENCE, "rank")
    found.send({"kind": "go"})
    for other in others:
        assert (json.loads(other.communicate(timeout=PATIENCE)[0]), other.returncode) == ({"kind": "go"}, 0)
    found.close()


def test_fifty_come_at_once(fixed: Fixed) -> None:
    met: list[Meeting] = []
    threads = [
        threading.Thread(target=lambda i=i: met.append(join(fixed, handshake(i, 51), PATIENCE, "rank")))
        for i in range(1, 51)
    ]
    for thread in threads:
        thread.start()
    found, handshakes = lead(fixed, 51, PATIENCE, "rank")
    for thread in threads:
        thread.join()
    assert [one["index"] for one in handshakes] == list(range(1, 51))
    end([found, *met])


def test_who_left_before_all_were_there_may_come_again(fixed: Fixed, background: ThreadPoolExecutor) -> None:
    leading = background.submit(lead, fixed, 3, PATIENCE, "node")
    join(fixed, handshake(1, 3, attempt=1), PATIENCE, "node").close()
    again = background.submit(join, fixed, handshake(1, 3, attempt=2), PATIENCE, "node")
    last = background.submit(join, fixed, handshake(2, 3), PATIENCE, "node")
    found, handshakes = leading.result(PATIENCE)
    assert handshakes[0]["attempt"] == 2
    end([found, again.result(PATIENCE), last.result(PATIENCE)])


def test_one_that_gave_up_waiting_for_a_stopped_leader_is_not_counted_twice(
    fixed: Fixed, background: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_HANDSHAKE_SECONDS", 0.2)
    listener, _ = fixed.listen()
    with listener:  # it listens, and its command is stopped: connections wait in the kernel
        joining = background.submit(join, fixed, handshake(1), PATIENCE, "node")
        time.sleep(0.7)
        assert not joining.done()
        monkeypatch.setattr(meeting, "_HANDSHAKE_SECONDS", PATIENCE)
        monkeypatch.setattr(Fixed, "listen", lambda _: (listener, ""))
        found, _ = lead(fixed, 2, PATIENCE, "node")
    other = joining.result(PATIENCE)
    found.send({"kind": "go"})
    assert other.peers[0].receive(time.monotonic() + PATIENCE) == {"kind": "go"}
    end([found, other])


# ------------------------------------------------------------------------------------------------------- who is missing


@pytest.mark.variants(1)
@pytest.mark.fault(25)
def test_those_who_did_not_come_are_named_to_those_who_did(way: Rendezvous, background: ThreadPoolExecutor) -> None:
    leading = background.submit(lead, way, 4, 3.0, "node")
    joining = background.submit(join, way, handshake(2, 4), PATIENCE, "node")
    assert refusal(leading).startswith("node 1, 3 of 4 did not join within 3 s. ")
    with closing(joining.result(PATIENCE)) as other:
        answer = other.peers[0].receive(time.monotonic() + PATIENCE)
        assert answer["kind"] == "absent"
        assert str(AbsentError.from_dict(answer["error"])) == refusal(leading)


def test_of_many_missing_ten_are_named(fixed: Fixed) -> None:
    with refused("join"):
        lead(fixed, 100, 0.1, "rank")


def test_what_counts_those_who_did_not_come_is_named(fixed: Fixed) -> None:
    with refused("unset"):
        lead(fixed, 2, 0.1, "rank", "srun")


@pytest.mark.fault(25)
def test_a_leader_that_never_comes_is_missed_in_time(fixed: Fixed, tmp_path: Path) -> None:
    said = f"nobody answered at 127.0.0.1:{fixed.port} (Connection refused)"
    shared = Published(tmp_path / "meeting")
    ways: list[tuple[Rendezvous, str]] = [
        (fixed, said),
        (shared, f"nothing was heard of it in {tmp_path}, which all hosts must see"),
        (Named.after("nobody"), "nobody answered on this host (Connection refused)"),
        (by_store(), "nothing was heard of it"),
    ]
    for way, seen in ways:
        with pytest.raises(RefusedError) as caught:
            join(way, handshake(1), 0.4, "node")
        assert is_about(caught.value, f"within 0.4 s: {seen}")


@pytest.mark.fault(26)
def test_a_host_that_nobody_knows_is_named(fixed: Fixed) -> None:
    for host in ("no-such-host.invalid", "a..b"):
        with refused("answered"):
            join(Fixed(host, 29500, NAMES), handshake(1), 0.3, "node")


# ------------------------------------------------------------------------------------------------------- contradictions


@pytest.mark.fault(27)
def test_two_commands_with_one_number_are_refused_with_their_hosts(
    way: Rendezvous, background: ThreadPoolExecutor
) -> None:
    leading = background.submit(lead, way, 3, PATIENCE, "node")
    first = join(way, handshake(1, 3), PATIENCE, "node")
    sentence = "two commands are node 1, on host1 and on host9: each needs its own number"
    with pytest.raises(RefusedError) as caught:
        join(way, {**handshake(1, 3), "host": "host9"}, PATIENCE, "node")
    assert (str(caught.value), refusal(leading)) == (sentence, sentence)
    answer = first.peers[0].receive(time.monotonic() + PATIENCE)
    assert (answer["kind"], str(RefusedError.from_dict(answer["error"]))) == ("refused", sentence)
    first.close()


@pytest.mark.fault(27)
def test_a_second_leader_is_refused(fixed: Fixed, background: ThreadPoolExecutor) -> None:
    leading = background.submit(lead, fixed, 2, PATIENCE, "rank")
    wait_for(lambda: is_open(fixed.port))
    with refused(f"launcher.master_port={fixed.port}"):
        lead(fixed, 2, PATIENCE, "rank")
    join(fixed, handshake(1), PATIENCE, "rank").close()
    leading.result(PATIENCE)[0].close()


@pytest.mark.fault(27)
@pytest.mark.parametrize(("index", "size"), [(1, 3), (2, 3), (5, 6)])
def test_commands_that_count_differently_are_refused(
    way: Rendezvous, background: ThreadPoolExecutor, index: int, size: int
) -> None:
    leading = background.submit(lead, way, 2, PATIENCE, "node")
    sentence = (
        f"node {index} on host{index} counts {size} in all, node 0 counts 2. Start all of them with the same number."
    )
    with pytest.raises(RefusedError) as caught:
        join(way, handshake(index, size), PATIENCE, "node")
    assert (str(caught.value), refusal(leading)) == (sentence, sentence)


# ------------------------------------------------------------------------------------------------- strangers at the
# door


def is_open(port: int, host: str = LOOPBACK) -> bool:
    try:
        wire.connect(host, port, 5).close()
    except OSError:
        return False
    return True


def send(data: bytes) -> Callable[[socket.socket], None]:
    return lambda channel: channel.sendall(data)


def reset(channel: socket.socket) -> None:
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    channel.close()


def endless(channel: socket.socket) -> None:
    try:
        while True:
            channel.sendall(b"x" * (1 << 16))
    except OSError:
        pass


STRANGERS: dict[str, Callable[[socket.socket], None]] = {
    "says nothing": lambda channel: None,
    "closes": lambda channel: channel.close(),
    "resets": reset,
    "speaks HTTP": send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "no text": send(bytes(range(128, 256)) + b"\n"),
    "half a line": send(b'{"index": 1'),
    "a list": send(b"[1, 2]\n"),
    "a deep list": send(b"[" * 100_000 + b"\n"),
    "a long number": send(b"1" * 10_000 + b"\n"),
    "an endless line": endless,
    "no word": send(json.dumps(handshake(1)).encode() + b"\n"),
    "a wrong word": send(json.dumps(handshake(1, word="guess")).encode() + b"\n"),
    "no index": send(b'{"word": ""}\n'),
    "odd types": send(b'{"word": "", "index": true, "size": "2", "host": 3}\n'),
}


@pytest.mark.fault(34)
@pytest.mark.parametrize("does", STRANGERS)
@pytest.mark.parametrize("kind", ["fixed", "named", "published"])
def test_a_stranger_disturbs_nobody(
    tmp_path: Path, background: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, kind: str, does: str
) -> None:
    monkeypatch.setattr(meeting, "_HANDSHAKE_SECONDS", 2 * PATIENCE)  # who waits for a stranger waits too long
    way = ways(tmp_path)[kind]
    leading = background.submit(lead, way, 2, PATIENCE, "rank")
    wait_for(lambda: way.seek() is not None and is_open(way.seek()[1], way.seek()[0]))  # type: ignore[index]
    place = way.seek()
    assert place is not None
    strangers = [wire.connect(*place[:2], 5) for _ in range(3)]
    doing = [background.submit(STRANGERS[does], stranger) for stranger in strangers]
    time.sleep(0.1)
    with closing(join(way, handshake(1), PATIENCE, "rank")):
        found, [one] = leading.result(PATIENCE)
        assert (one["host"], [peer.index for peer in found.peers]) == ("host1", [1])
        found.close()
    for stranger, future in zip(strangers, doing, strict=True):
        future.result(PATIENCE)
        stranger.close()


@pytest.mark.fault(34)
def test_a_stranger_that_says_nothing_is_turned_away_in_time(
    fixed: Fixed, background: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_HANDSHAKE_SECONDS", 0.3)
    leading = background.submit(lead, fixed, 2, PATIENCE, "rank")
    wait_for(lambda: is_open(fixed.port))
    with socket.create_connection((LOOPBACK, fixed.port), timeout=PATIENCE) as stranger:
        assert stranger.recv(1) == b""
    monkeypatch.setattr(meeting, "_HANDSHAKE_SECONDS", PATIENCE)
    join(fixed, handshake(1), PATIENCE, "rank").close()
    leading.result(PATIENCE)[0].close()


@pytest.mark.variants(1)
@pytest.mark.fault(24)
@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"{}\n", b'{"kind": "welcome"}\n', b'{"kind": "refused"}\n', None]
)
def test_a_port_of_another_program_is_not_taken_for_the_leader(
    fixed: Fixed, background: ThreadPoolExecutor, answer: bytes | None
) -> None:
    with socket.create_server((LOOPBACK, fixed.port)) as other:
        serving = background.submit(serve, other, answer or b"")
        with refused("answers"):
            join(fixed, handshake(1), 1.5, "rank")
        other.shutdown(socket.SHUT_RDWR)
        serving.result(PATIENCE)


@pytest.mark.fault(24)
@pytest.mark.parametrize("speaks", [True, False])
def test_another_program_at_the_port_is_refused_soon_whether_it_speaks_or_not(
    fixed: Fixed, background: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, speaks: bool
) -> None:
    monkeypatch.setattr(meeting, "_HANDSHAKE_SECONDS", 0.4)
    monkeypatch.setattr(meeting, "_STRANGE_SECONDS", 0.5)
    with socket.create_server((LOOPBACK, fixed.port)) as other:
        serving = background.submit(serve, other, b"220 mail.example\r\n") if speaks else None
        with pytest.raises(RefusedError) as caught:
            join(fixed, handshake(1), PATIENCE, "rank")
        other.shutdown(socket.SHUT_RDWR)
        if serving is not None:
            serving.result(PATIENCE)
    assert is_about(caught.value, "program")


@pytest.mark.slow
def test_a_stranger_that_leaves_the_port_in_time_is_forgotten(
    fixed: Fixed, background: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_STRANGE_SECONDS", 4.0)
    with socket.create_server((LOOPBACK, fixed.port)) as other:  # such as a job before, which is just ending
        serving = background.submit(serve, other, b"")
        joining = background.submit(join, fixed, handshake(1), PATIENCE, "rank")
        time.sleep(0.4)
        other.shutdown(socket.SHUT_RDWR)
        serving.result(PATIENCE)
    time.sleep(4)
    assert not joining.done()
    found, _ = lead(fixed, 2, PATIENCE, "rank")
    end([found, joining.result(PATIENCE)])


def serve(listener: socket.socket, answer: bytes) -> None:
    """Answer who comes and close, until the listener is shut down."""
    while True:
        try:
            channel, _ = listener.accept()
        except OSError:
            return
        with channel:
            if answer:
                channel.sendall(answer)


def test_a_port_that_answers_itself_is_not_taken_for_the_leader(fixed: Fixed, monkeypatch: pytest.MonkeyPatch) -> None:
    # Linux may choose the very port that is looked for as the connection's own, and then connects it to itself.
    answered: list[socket.socket] = []

    def to_itself(place: tuple[str, int], timeout: float) -> socket.socket:
        channel = socket.socket()
        channel.settimeout(timeout)
        channel.bind(place)
        channel.connect(place)
        answered.append(channel)
        return channel

    monkeypatch.setattr(socket, "create_connection", to_itself)
    with refused("find"):
        join(fixed, handshake(1), 0.3, "rank")
    assert len(answered) > 1
    fixed.listen()[0].close()  # the port is free


# ------------------------------------------------------------------------------------------------------- a written
# place


def test_the_file_is_private_and_gone_after_the_meeting(tmp_path: Path, background: ThreadPoolExecutor) -> None:
    way = Published(tmp_path / "deep" / "meeting")
    leading = background.submit(lead, way, 2, PATIENCE, "rank")
    wait_for(way.path.exists)
    found = way.path.stat()
    assert (found.st_mode & 0o777, found.st_uid) == (0o600, os.getuid())
    join(way, handshake(1), PATIENCE, "rank").close()
    leading.result(PATIENCE)[0].close()
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_gone_after_a_meeting_that_failed(tmp_path: Path) -> None:
    way = Published(tmp_path / "meeting")
    with pytest.raises(RefusedError):
        lead(way, 2, 0.1, "rank")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "stale",
    ["dead port", "silent listener", "closing listener", "garbage", "other json", "empty", "a pipe", "a folder"],
)
def test_what_was_left_in_the_files_place_is_survived(
    tmp_path: Path, background: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, stale: str
) -> None:
    monkeypatch.setattr(meeting, "_HANDSHAKE_SECONDS", 0.5)
    way = Published(tmp_path / "meeting")
    with socket.create_server((LOOPBACK, 0)) as other:
        port = other.getsockname()[1]
        if stale in ("dead port", "closing listener"):
            other.close()
        if stale == "a pipe":
            os.mkfifo(way.path)
        elif stale == "a folder":
            way.path.mkdir()
        else:
            texts = {"garbage": "\0\1\2", "other json": "[1, null, {}]", "empty": ""}
            way.path.write_text(texts.get(stale, json.dumps([LOOPBACK, port, "0" * 32])))
        joining = background.submit(join, way, handshake(1), PATIENCE, "rank")
        time.sleep(0.2)
        assert not joining.done()
        if stale == "a folder":
            way.path.rmdir()  # nothing takes a folder's place, which the leader says
        monkeypatch.setattr(meeting, "_HANDSHAKE_SECONDS", 5.0)
        found, _ = lead(way, 2, PATIENCE, "rank")
        end([found, joining.result(PATIENCE)])


def test_a_link_in_the_files_place_is_not_followed(tmp_path: Path, background: ThreadPoolExecutor) -> None:
    real = Published(tmp_path / "real")
    way = Published(tmp_path / "meeting")
    listener, _ = real.listen()
    with listener:
        way.path.symlink_to(real.path)
        assert real.seek() is not None
        assert way.seek() is None
    before = real.path.read_text()
    listener, _ = way.listen()  # which replaces the link and leaves what it points to
    listener.close()
    assert not way.path.is_symlink()
    assert real.path.read_text() == before


def test_a_file_of_another_user_is_not_read(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file to another user")
    way = Published(tmp_path / "meeting")
    way.path.write_text(json.dumps([LOOPBACK, 1, "x"]))
    assert way.seek() == (LOOPBACK, 1, "x")
    os.chown(way.path, 12345, -1)
    assert way.seek() is None


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    way = Published(tmp_path / "file" / "meeting")
    with refused("meeting"):
        lead(way, 2, 5, "rank")


def test_on_one_host_a_name_leads_to_rank_zero_and_else_a_file_beside_the_run(tmp_path: Path) -> None:
    here, beside = by_key("job 1", tmp_path / "runs", True), by_key("job 1", tmp_path / "runs", False)
    assert isinstance(here, Named)
    assert isinstance(beside, Published)
    assert beside.path.parent == tmp_path / "runs"
    assert here == by_key("job 1", tmp_path / "elsewhere", True)
    assert here != by_key("job 2", tmp_path / "runs", True)
    assert beside != by_key("job 2", tmp_path / "runs", False)


def test_a_file_that_a_killed_leader_left_is_removed_by_who_was_led_nowhere(tmp_path: Path) -> None:
    way = Published(tmp_path / "meeting")
    way.listen()[0].close()  # as a killed one does
    with refused("connection"):
        join(Published(way.path), handshake(1), 0.3, "rank")
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_leader_stays(tmp_path: Path) -> None:
    one, other = Published(tmp_path / "meeting"), Published(tmp_path / "meeting")
    for way in (one, other):
        way.listen()[0].close()
    one.close()
    assert other.path.exists()
    other.close()
    assert not other.path.exists()


def test_a_file_of_a_day_ago_is_swept_away(tmp_path: Path) -> None:
    old, young = tmp_path / ".meeting-1", tmp_path / ".meeting-2"
    for path, hours in ((old, 25), (young, 1)):
        path.touch()
        os.utime(path, (time.time() - hours * 3600,) * 2)
    way = Published.under(tmp_path, "job")
    way.listen()[0].close()
    assert set(tmp_path.iterdir()) == {young, way.path}


def test_a_name_that_somebody_else_has_is_refused() -> None:
    way = Named.after("taken")
    with (
        way.listen()[0],
        refused("socket"),
    ):
        lead(way, 2, 5, "rank")


OTHER_USER = """\
import encodings.idna, os, sys
from ddpexp.errors import RefusedError
from ddpexp.launch.rendezvous import kinds, meeting, wire
os.setgid(12345)
os.setuid(12345)
way = kinds.Named(sys.argv[1])
if sys.argv[2] == "lead":
    with way.listen()[0] as listener:
        print("here", flush=True)
        sys.stdin.read()
else:
    wire.is_same_user = lambda channel: True  # it does not check
    print("here", flush=True)
    try:
        meeting.join(way, {"index": 1, "size": 2, "host": "x"}, 1, "rank")
    except RefusedError as error:
        print(error)
"""


@pytest.mark.variants(1)
@pytest.mark.fault("S16")
@pytest.mark.parametrize("does", ["lead", "join"])
def test_another_user_is_neither_let_in_nor_followed(does: str) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    way = Named.after(f"other user {does}")
    command = [sys.executable, "-c", OTHER_USER, way.name, does]
    pipe = subprocess.PIPE
    if does == "lead":
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "here\n"
            with refused("answers"):
                join(way, handshake(1), 2, "rank")
            other.communicate("", timeout=PATIENCE)
    else:
        with subprocess.Popen(command, stdout=pipe, text=True, cwd=ROOT) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "here\n"
            with refused("rank"):
                lead(way, 2, 2, "rank")
            assert "rank 1 did not find rank 0" in other.communicate(timeout=PATIENCE)[0]


# ------------------------------------------------------------------------------------------------- addresses and ports


@pytest.mark.fault("S6")
def test_what_serves_one_host_listens_on_loopback_alone_or_on_no_network(tmp_path: Path) -> None:
    for way in (Fixed(LOOPBACK, free_port(), NAMES), by_store()):
        with way.listen()[0] as listener:
            assert listener.getsockname()[0] == LOOPBACK
    with by_key("job", tmp_path, True).listen()[0] as listener:
        assert listener.family == socket.AF_UNIX


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_a_name_of_loopback_means_loopback_alone(host: str, background: ThreadPoolExecutor) -> None:
    way = Fixed(host, free_port(), NAMES)
    with way.listen()[0] as listener:
        assert listener.getsockname()[0] == LOOPBACK
    leading = background.submit(lead, way, 2, PATIENCE, "node")
    end([join(way, handshake(1), PATIENCE, "node"), leading.result(PATIENCE)[0]])


@pytest.mark.fault(24)
def test_a_port_in_use_is_refused(fixed: Fixed) -> None:
    with socket.create_server((LOOPBACK, fixed.port)), pytest.raises(RefusedError) as caught:
        lead(fixed, 2, 5, "node")
    assert is_about(caught.value, f"launcher.master_port={fixed.port}")


@pytest.mark.fault(26)
@pytest.mark.parametrize("host", ["203.0.113.1", "198.51.100.7"])  # of documents, of no host
def test_an_address_of_another_host_is_refused(host: str) -> None:
    with pytest.raises(RefusedError) as caught:
        lead(Fixed(host, free_port(), NAMES), 2, 5, "node")
    assert is_about(caught.value, f"launcher.master_addr={host}")


@pytest.mark.fault(26)
@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "not a host"])
def test_a_name_of_no_host_is_refused(host: str) -> None:
    with refused(f"MASTER_ADDR={host}"):
        lead(Fixed(host, free_port(), ("MASTER_ADDR", "MASTER_PORT")), 2, 5, "rank")


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_an_address_of_all_interfaces_is_refused(host: str) -> None:
    with pytest.raises(RefusedError) as caught:
        lead(Fixed(host, free_port(), NAMES), 2, 5, "node")
    assert is_about(caught.value, f"launcher.master_addr={host}")


@pytest.mark.fault(26)
def test_a_name_that_stands_for_loopback_alone_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    # Debian gives a host's own name to 127.0.1.1: a fake of its /etc/hosts.
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_: [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.1.1", 0))]
    )
    with refused("reaches"):
        lead(Fixed("box", free_port(), NAMES), 2, 0.1, "node")


@pytest.mark.fault(28)
def test_a_connection_that_the_network_cuts_is_known_to_be_gone_in_seconds(
    fixed: Fixed, background: ThreadPoolExecutor
) -> None:
    leading = background.submit(lead, fixed, 2, PATIENCE, "node")
    other = join(fixed, handshake(1), PATIENCE, "node")
    found, _ = leading.result(PATIENCE)
    for channel in (found.peers[0].channel, other.peers[0].channel):
        assert channel.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, every, times, unanswered = (channel.getsockopt(socket.IPPROTO_TCP, option) for option in wire.KEEPALIVE)
        assert idle + every * times <= 10
        assert 0 < unanswered <= 10_000
    end([found, other])
