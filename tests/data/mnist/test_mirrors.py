"""Mirrors that are slow, wrong or out of reach."""

from __future__ import annotations

import gzip
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from ddpexp.data import mirrors
from ddpexp.data.mirrors import Patience
from tests.conftest import PATIENCE
from tests.data.conftest import PATIENT, TEST_IMAGES, TRAIN_LABELS, Server, Small, prepare, refusal

pytestmark = pytest.mark.usefixtures("home")


def hang_up_early(content: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content[: len(content) // 2])

    return answer


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b"\x1f\x8b" + bytes(10_000))


def dripping(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b"\x1f")
        time.sleep(0.05)


def stalling(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b"\x1f\x8b\x08")
    handler.wfile.flush()
    handler.connection.recv(1)  # until the other side hangs up


def silent(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.recv(1)


BAD_ANSWERS: dict[str, tuple[Callable[[bytes], Any], str]] = {
    "404": (lambda content: None, "HTTP Error 404"),
    "empty": (lambda content: b"", "is empty, not data"),
    "web page": (lambda content: b"<html>log in first</html>", "is a web page, not data"),
    "truncated": (lambda content: hang_up_early(gzip.compress(content)), "is cut off"),
    "endless": (lambda content: endless, "continues after 7,856 bytes"),
    "dripping": (lambda content: dripping, "came too slowly"),
    "stalling": (lambda content: stalling, "stopped coming after 3 bytes"),
    "silent": (lambda content: silent, "no answer from|timed out"),
    "wrong content": (lambda content: gzip.compress(content[:-1] + b"\x07"), "SHA-256"),
}


def patience_with(bad: str, mirrors: int) -> Patience:
    """Return the limits under which a bad answer is bad soon, and no other one."""
    if bad in ("stalling", "silent"):
        return replace(PATIENT, stall=2.0 * mirrors)  # which they share
    return replace(PATIENT, total=3.0) if bad == "dripping" else PATIENT


@pytest.mark.variants(1)
@pytest.mark.fault(57, 58)
@pytest.mark.parametrize("bad", BAD_ANSWERS)
def test_bad_mirror_is_refused_in_time_and_nothing_of_it_kept(
    bad: str, small: Small, server: Server, tmp_path: Path
) -> None:
    make, fault = BAD_ANSWERS[bad]
    server.answers |= small.packed | {TEST_IMAGES: make(small.unpacked[TEST_IMAGES])}
    text = refusal(tmp_path / "new", "download", server, patience=patience_with(bad, 1))
    assert text.startswith(f"data.root={tmp_path / 'new'} holds none of the files of MNIST")
    assert server.address in text
    assert re.search(fault, text)
    assert not (tmp_path / "new").exists()


@pytest.mark.variants(1)
@pytest.mark.fault(58)
@pytest.mark.parametrize("bad", sorted(BAD_ANSWERS.keys() - {"dripping"}))  # which uses up the time of all mirrors
def test_second_mirror_serves_where_the_first_is_bad(
    bad: str, small: Small, server: Server, other_server: Server, tmp_path: Path
) -> None:
    make, _ = BAD_ANSWERS[bad]
    server.answers |= {TRAIN_LABELS: make(small.unpacked[TEST_IMAGES])} | {
        name: content for name, content in small.packed.items() if name != TRAIN_LABELS
    }
    other_server.answers |= small.packed
    found = prepare(tmp_path / "new", "download", server, other_server, patience=patience_with(bad, 2))
    assert found["num_train"] == 20
    assert other_server.requests[0] == TRAIN_LABELS


@pytest.mark.fault(58)
def test_name_look_up_that_hangs_is_cut_off(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def hanging(*_: Any, **__: Any) -> Any:
        released.wait(PATIENCE)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    warnings: list[str] = []
    mirrors = [Server("http://one.invalid/"), Server("http://two.invalid/")]
    prepare(None, "auto", *mirrors, warn=warnings.append, patience=replace(PATIENT, first=1.0))
    released.set()
    assert "no answer from http://one.invalid/, http://two.invalid/ within 1 seconds" in warnings[0]


def test_auto_tries_a_failed_download_again_only_after_a_while(small: Small, server: Server, home: Path) -> None:
    warnings: list[str] = []
    prepare(None, "auto", server, warn=warnings.append)
    server.answers |= small.packed
    assert prepare(None, "auto", server, warn=warnings.append)["source"] == "embedded"
    assert len(server.requests) == 1
    assert "tried less than 10 minutes ago" in warnings[1]
    assert "HTTP Error 404" in warnings[1]
    note = home / ".ddpexp-cache" / "download-failed-mnist"
    os.utime(note, (time.time() - 700,) * 2)
    assert prepare(None, "auto", server)["source"] == "download"
    assert not note.exists()


@pytest.mark.parametrize("source", ["download", "auto"])
def test_download_is_tried_at_once_where_nothing_can_stand_in(
    small: Small, server: Server, tmp_path: Path, source: str, home: Path
) -> None:
    prepare(None, "auto", server, warn=lambda _: None)
    server.answers |= small.packed
    assert prepare(tmp_path, source, server)["source"] == "download"


def test_auto_waits_five_seconds_at_most_for_first_bytes() -> None:
    assert mirrors.AUTO_PATIENCE.first == 5.0
