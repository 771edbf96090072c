"""Remote shards: read in parts, kept in a bounded cache that all processes share, and retried.

Addresses that begin with file:// take the way of all others; the tests with a server need aiohttp.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ddpexp.data.tar_shards import remote
from ddpexp.data.tar_shards.dataset import load
from ddpexp.data.tar_shards.prepare import expand, prepare
from ddpexp.errors import DdpexpError
from tests.data.tar_shards.test_tar_shards import write
from tests.refusals import refused

PART = 4096
FILES = ["cls", "txt"]


@pytest.fixture(autouse=True)
def small(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(remote, "PART", PART)
    monkeypatch.setattr(remote, "_WAITS", (0.01, 0.01, 0.01))


class Handler(SimpleHTTPRequestHandler):
    """Python's server, with ranges unless told otherwise, and failures in the middle of an answer."""

    def send_head(self) -> Any:
        server: Any = self.server
        server.asked[self.command] += 1
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return None
        data, wanted = path.read_bytes(), self.headers.get("Range")
        begin, end = 0, len(data)
        if wanted and server.ranges:
            found = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
            assert found is not None
            begin, end = int(found[1]), min(int(found[2]) + 1, len(data))
        self.send_response(206 if end - begin < len(data) else 200)
        self.send_header("Content-Length", str(end - begin))
        if server.ranges:
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            broken = server.broken > 0
            server.broken -= broken
            self.wfile.write(data[begin : (begin + end) // 2 if broken else end])
            if broken:
                self.close_connection = True
        return None

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    pytest.importorskip("aiohttp")
    write(tmp_path)
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path)))
    server.asked, server.broken, server.ranges = Counter(), 0, True
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}/train-{{000..002}}.tar"
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def samples(prepared: dict[str, Any]) -> list[Any]:
    train = load(prepared).train
    return [train[number] for number in range(len(train))]


EXPECTED = [(number, f"text {number}") for number in range(30)]


def parts() -> list[str]:
    return [path.name for path in remote.folder().iterdir() if path.is_file()]


@pytest.mark.parametrize("ranges", [True, False])
def test_shards_of_a_server_are_as_local_ones_and_are_fetched_once(server: Any, tmp_path: Path, ranges: bool) -> None:
    server.ranges = ranges
    prepared = prepare(server.url, None, FILES)
    assert samples(prepared) == EXPECTED
    assert prepared["hash"] == prepare(str(tmp_path / "train-*.tar"), None, FILES)["hash"]
    asked = server.asked["GET"]
    again = prepare(server.url, None, FILES)
    assert (samples(again), server.asked["GET"]) == (EXPECTED, asked)
    assert asked == 3 if not ranges else asked > 3
    write(tmp_path, shards=1, samples=12)
    assert len(samples(prepare(server.url, None, FILES))) == 32


def test_answers_that_break_off_are_asked_for_again(server: Any) -> None:
    server.broken = 3
    assert samples(prepare(server.url, None, FILES)) == EXPECTED
    assert server.broken == 0


def test_a_server_that_fails_for_good_is_named_with_the_place(server: Any, tmp_path: Path) -> None:
    train = load(prepare(server.url, None, FILES)).train
    for name in parts():
        (remote.folder() / name).unlink()
    server.broken = 1000
    with refused("train-000.tar: at byte 0 after 4 tries", DdpexpError):
        train[0]
    server.broken = 0
    assert train[0] == EXPECTED[0]
    (tmp_path / "train-001.tar").unlink()
    with refused("train-001.tar: no longer exists", DdpexpError):
        train[10]
    with refused(": no such file"):
        prepare(server.url, None, FILES)


def test_a_server_that_is_not_there_is_refused(server: Any) -> None:
    with refused("data.path=http://127.0.0.1:1/a.tar: cannot be read"):
        prepare("http://127.0.0.1:1/a.tar", None, FILES)


def test_the_cache_keeps_its_bound_and_what_was_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = (write(tmp_path, shards=2, samples=30) / "train-*.tar").as_uri().replace("%2A", "*")
    monkeypatch.setattr(remote, "_USED_AGAIN", 0.0)
    prepared = prepare(url, None, FILES, cache_gb=6 * PART / 1e9)
    shards = [remote.RemoteShard(**shard) for shard in prepared["sets"]["train"]["remote"]]
    local = [Path(shard.url.removeprefix("file://")).read_bytes() for shard in shards]
    assert len(local[0]) > 12 * PART
    for number in range(12):
        for shard, data in zip(shards, local, strict=True):
            assert shard.read(0, 10) == data[:10]  # used all the time
            assert shard.read(number * PART - (number > 0), PART) == data[number * PART - (number > 0) :][:PART]
            assert sum((remote.folder() / name).stat().st_size for name in parts()) <= 6 * PART
            assert f"{shard.version}-0" in parts()


def test_what_is_evicted_while_it_is_read_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = (write(tmp_path, shards=1) / "train-000.tar").as_uri()
    [shard] = remote.find("data.path", [url], 2 * PART)
    data = (tmp_path / "train-000.tar").read_bytes()
    assert shard.read(0, PART) == data[:PART]
    whole = os.pread

    def evicted(descriptor: int, size: int, offset: int) -> bytes:
        monkeypatch.setattr(os, "pread", whole)
        assert shard.read(PART, 3 * PART) == data[PART : 4 * PART]
        assert f"{shard.version}-0" not in parts()
        return whole(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", evicted)
    assert shard.read(0, PART) == data[:PART]


def test_a_part_that_another_process_is_writing_is_not_evicted_but_one_that_was_left_is(tmp_path: Path) -> None:
    [shard] = remote.find("data.path", [(write(tmp_path, shards=1) / "train-000.tar").as_uri()], 2 * PART)
    shard.read(0, 10)
    written, left = remote.folder() / ".part-1-123", remote.folder() / ".part-2-124"
    for path in (written, left):
        path.write_bytes(bytes(PART))
    os.utime(left, (1e9, 1e9))
    os.utime(written, (time.time() - 60, time.time() - 60))
    shard.read(PART, 10)
    assert written.exists()
    assert not left.exists()


def read_all(shard: remote.RemoteShard, first: int) -> None:
    data = Path(shard.url.removeprefix("file://")).read_bytes()
    remote.PART = PART
    for turn in range(30):
        place = (first * 7919 + turn * 1009) % (len(data) - 100)
        assert shard.read(place, 100) == data[place : place + 100]


def test_processes_share_a_cache_that_is_too_small_for_them(tmp_path: Path) -> None:
    [shard] = remote.find("data.path", [(write(tmp_path, 1, 30) / "train-000.tar").as_uri()], 3 * PART)
    processes = [multiprocessing.get_context("fork").Process(target=read_all, args=(shard, rank)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert sum((remote.folder() / name).stat().st_size for name in parts()) <= 3 * PART + 3 * PART  # a write of each


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"path": "nothing://there/a.tar"}, "data.path=nothing://there/a.tar: protocol"),
        ({"path": "file:///nowhere/a.tar"}, "data.path=file:///nowhere/a.tar"),
        ({"path": "file:///nowhere/a-*.tar"}, "data.path=file:///nowhere/a-*.tar"),
        ({"path": "http://127.0.0.1:1/a.tar"}, "data.path=http://127.0.0.1:1/a.tar: address"),
        ({"path": "a.tar", "cache_gb": 0.001}, "data.cache_gb=0.001"),
    ],
)
def test_bad_addresses_are_refused(keys: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if str(keys["path"]).startswith("http"):
        pytest.importorskip("aiohttp")
    monkeypatch.setattr(remote, "PART", 1 << 23)
    with refused(message):
        prepare(**{"files": FILES, **keys})


def test_ranges_of_numbers_in_braces_are_expanded() -> None:
    assert expand("a-{08..10}/b{1..2}.tar") == [f"a-{a}/b{b}.tar" for a in ("08", "09", "10") for b in (1, 2)]
    assert expand("a-*.tar") == ["a-*.tar"]
