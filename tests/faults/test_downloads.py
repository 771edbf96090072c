"""Files of data that are wrong, mirrors that fail, and commands that all want the same data at once."""

from __future__ import annotations

import gzip
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PATIENCE, Done, finish
from tests.data.conftest import NAMES, TEST_IMAGES, TEST_LABELS, Server, serve
from tests.refusals import command_refused

# The real command, but for the addresses of the mirrors and its patience with them, which no user can set.
PROGRAM = """\
import sys
from ddpexp.data import mirrors
from ddpexp.data.mnist import prepare as mnist_files

address, stall, *words = sys.argv[1:]
patience = mirrors.Patience(first=600.0, stall=float(stall), total=600.0)
mnist_files.prepare.__kwdefaults__.update(mirrors=(address,), patience=patience)
sys.argv[1:] = words
from ddpexp.__main__ import run
run()
"""
SHORT = ("recipe=mnist", "model=linear", "trainer.max_steps=1", "trainer.eval_every=0", "logger=none", "trainer.gpus=1")


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """How data come is tested, not how fork servers start."""
    return warm_environ


@pytest.fixture
def mirror(mnist_root: Path) -> Iterator[Server]:
    """A mirror with the real files."""
    for server in serve():
        server.answers |= {name: (mnist_root / f"{name}.gz").read_bytes() for name in NAMES}
        yield server


class Commands:
    """Commands of one user of one host."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.folder, self.root = folder, folder / "data"
        self.environ = {**environ, "XDG_CACHE_HOME": str(folder / "cache"), "no_proxy": "*"}
        self._count = 0

    def start(self, address: str, *overrides: str, stall: float = 600.0) -> tuple[subprocess.Popen[str], Path]:
        self._count += 1
        run = self.folder / f"run{self._count}"
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, address, str(stall), *SHORT, f"data.root={self.root}", f"run.dir={run}",
                *overrides],
            cwd=self.folder, env=self.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
        return process, run

    def __call__(self, address: str, *overrides: str, stall: float = 600.0) -> Done:
        return finish(*self.start(address, *overrides, stall=stall))


@pytest.fixture
def commands(tmp_path: Path, environ: dict[str, str]) -> Commands:
    return Commands(tmp_path, environ)


@pytest.fixture
def files(commands: Commands, mnist_root: Path) -> Path:
    """A data.root with files that a test may change."""
    commands.root.mkdir()
    for name in NAMES:
        shutil.copy(mnist_root / f"{name}.gz", commands.root)
    return commands.root


def refused(done: Done, expected: str) -> None:
    """Check that the command was refused with one sentence, and left nothing behind."""
    command_refused(done, expected)
    assert done.err.count("\n") == 1, done.err
    assert not done.run.exists()


def bomb(size: int) -> bytes:
    """Make gzip data that unpacks to `size` zeros and more, a thousand times as many as it has bytes."""
    pack = zlib.compressobj(9, zlib.DEFLATED, -15)
    million = pack.compress(bytes(1 << 20)) + pack.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + million * (size >> 20)


# --- Files ---

WRONG: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (
        lambda packed: packed[:1000],
        "cut off",
    ),
    "web page": (
        lambda packed: b"<!DOCTYPE html><p>Sign in</p>",
        "a web page",
    ),
    "bomb with a true beginning": (
        lambda packed: gzip.compress(gzip.decompress(packed)) + bomb(4 << 30),
        "more than 10,008 bytes",
    ),
}


@pytest.mark.variants(1)
@pytest.mark.fault(57, "S11")
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_file_is_refused_before_any_worker_starts(commands: Commands, files: Path, wrong: str) -> None:
    spoil, word = WRONG[wrong]
    path = files / f"{TEST_LABELS}.gz"
    path.write_bytes(spoil(path.read_bytes()))
    process, run = commands.start("http://127.0.0.1:9/", "data.source=files")
    # A gigabyte: the bombs are of four. What the kernel reports of a child counts the peak of its parent before it, too.
    resource.prlimit(process.pid, resource.RLIMIT_DATA, (1 << 30, 1 << 30))
    done = finish(process, run)
    refused(done, f"{path}: {word}")
    assert "data.source=download" in done.err
    assert sorted(entry.name for entry in files.iterdir()) == sorted(f"{name}.gz" for name in NAMES)


# --- Mirrors ---


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    handler.wfile.write(gzip.compress(os.urandom(2000))[:1003])


def unavailable(handler: BaseHTTPRequestHandler) -> None:
    handler.send_error(503)


def stall(handler: BaseHTTPRequestHandler) -> None:
    hang_up(handler)
    handler.wfile.flush()
    handler.connection.recv(1)  # until the other side hangs up


BAD: dict[str, tuple[Any, str]] = {
    "cut": (hang_up, "is cut off|broke off"),
    "503": (unavailable, "503"),
    "slow": (stall, "1,003 bytes"),
    "bomb": (bomb(4 << 30), "7,840,016 bytes|magic number 0"),
}


@pytest.mark.variants(1)
@pytest.mark.fault(57, 58, "S11")
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_mirror_is_refused_with_its_address_and_nothing_is_kept(
    commands: Commands, mirror: Server, bad: str
) -> None:
    answer, fault = BAD[bad]
    mirror.answers[TEST_IMAGES] = answer
    done = commands(mirror.address, "data.source=download", **({"stall": 3.0} if bad == "slow" else {}))
    refused(done, f"data.root={commands.root}: {mirror.address}")
    assert re.search(fault, done.err), done.err
    assert not commands.root.exists()


# --- Several at once ---


@pytest.mark.fault(59)
def test_of_several_commands_without_data_one_downloads_and_all_train(commands: Commands, mirror: Server) -> None:
    several = [commands.start(mirror.address, "data.source=download") for _ in range(3)]
    ends = [finish(*one) for one in several]
    assert [done.code for done in ends] == [0, 0, 0], [done.err for done in ends]
    assert sorted(mirror.requests) == sorted(NAMES), "each file once"
    assert len({done.result()["weights_sha256"] for done in ends}) == 1


@pytest.mark.slow
@pytest.mark.fault(59)
def test_a_command_killed_in_its_download_does_not_hold_the_next_one_up(commands: Commands, mirror: Server) -> None:
    requested = threading.Event()
    continues = threading.Event()
    content = mirror.answers[NAMES[0]]
    assert isinstance(content, bytes)
    answer = b"HTTP/1.0 200 OK\r\n\r\n" + content

    def wait(handler: BaseHTTPRequestHandler) -> None:
        if requested.is_set():
            handler.wfile.write(answer)
            return
        requested.set()
        continues.wait(PATIENCE)

    mirror.answers[NAMES[0]] = wait
    process, run = commands.start(mirror.address, "data.source=download")
    assert requested.wait(PATIENCE)
    other, others_run = commands.start(mirror.address, "data.source=download")
    assert other.stderr is not None
    assert other.stderr.readline() == "ddpexp: waiting for another command, which is downloading the data\n"
    process.send_signal(signal.SIGKILL)
    done = finish(other, others_run)
    continues.set()
    assert done.code == 0, done.err
    assert finish(process, run).code == -signal.SIGKILL
    assert mirror.requests.count(NAMES[1]) == 1
