"""A small set in place of MNIST where that is enough, and mirrors for it.

The network is a server on 127.0.0.1; a look-up of any other host fails the test.
"""

from __future__ import annotations

import gzip
import hashlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ddpexp.data.mirrors import Patience
from ddpexp.data.mnist import idx, synthetic
from ddpexp.data.mnist import prepare as mnist_files
from ddpexp.errors import RefusedError
from tests.conftest import PATIENCE

TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = (file.name for file in idx.FILES)
NAMES = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)
PATIENT = Patience(first=PATIENCE, stall=PATIENCE, total=PATIENCE)
"""No mirror that answers is too slow for it; tests of mirrors that do not have one of their own."""


@dataclass(frozen=True)
class Small:
    """A set of 20 + 10 digits that passes for MNIST."""

    unpacked: dict[str, bytes]
    packed: dict[str, bytes]
    images: np.ndarray[Any, Any]


@dataclass
class Server:
    """A mirror; `answers` maps a file's name to its bytes or to a function that answers itself."""

    address: str
    answers: dict[str, bytes | Callable[[BaseHTTPRequestHandler], None]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the tests of a file a user cache folder: that of the machine keeps notes of all tests, to be looked over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user-cache")))
        yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test its own user cache folder, and no network but its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("DDPEXP_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "*")
    look_up = socket.getaddrinfo

    def local_only(host: str, *rest: Any, **more: Any) -> Any:
        assert host == "127.0.0.1", f"a test asked the network for {host}"
        return look_up(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", local_only)
    return tmp_path / "xdg" / "ddpexp"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Small:
    unpacked = {}
    files = []
    arrays = [*synthetic.draw(20, 1), *synthetic.draw(10, 2)]
    for file, array in zip(idx.FILES, arrays, strict=True):
        unpacked[file.name] = idx.header(array.shape) + array.tobytes()
        files.append(idx.idx_file(file.name, array.shape, hashlib.sha256(unpacked[file.name]).hexdigest()))
    monkeypatch.setattr(idx, "FILES", tuple(files))
    return Small(unpacked, {name: gzip.compress(content) for name, content in unpacked.items()}, arrays[0])


@pytest.fixture
def root(small: Small, tmp_path: Path) -> Path:
    """Make a data folder with the four files of the small set."""
    root = tmp_path / "data"
    root.mkdir()
    for name, content in small.packed.items():
        (root / f"{name}.gz").write_bytes(content)
    return root


@pytest.fixture
def real(mnist_root: Path, tmp_path: Path) -> Path:
    """Make a data folder with links to the real MNIST."""
    root = tmp_path / "mnist"
    root.mkdir()
    for name in NAMES:
        (root / f"{name}.gz").symlink_to(mnist_root / f"{name}.gz")
    return root


@pytest.fixture(name="server")
def first_mirror() -> Iterator[Server]:
    yield from serve()


@pytest.fixture(name="other_server")
def second_mirror() -> Iterator[Server]:
    yield from serve()


def serve() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rsplit("/", 1)[-1].removesuffix(".gz")
            server.requests.append(name)
            answer = server.answers.get(name)
            if answer is None:
                self.send_error(404)
            elif isinstance(answer, bytes):
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)
            else:
                answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            """Say nothing of a client that has gone: several tests hang up."""

    http = Quiet(("127.0.0.1", 0), Handler)
    server = Server(f"http://127.0.0.1:{http.server_port}/mnist/")
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    http.shutdown()
    http.server_close()


def prepare(
    root: Path | str | None,
    source: Any,
    *servers: Server,
    warn: Callable[[str], None] | None = None,
    patience: Patience = PATIENT,
) -> Any:
    mirrors = [server.address for server in servers]
    folder = None if root is None else str(root)
    with mock.patch("ddpexp.data.published.print_message", warn or pytest.fail):
        return mnist_files.prepare(folder, source, 30, 20, mirrors=mirrors, patience=patience)


def refusal(root: Path | str | None, source: str, *servers: Server, patience: Patience = PATIENT) -> str:
    with pytest.raises(RefusedError) as error:
        prepare(root, source, *servers, patience=patience)
    assert "\n" not in str(error.value)
    return str(error.value)


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
