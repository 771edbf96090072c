"""CIFAR-10's archive: read, refused, downloaded or replaced by drawn pictures."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from ddpexp.data.cifar10 import archive as archives
from ddpexp.data.cifar10 import prepare as files
from ddpexp.data.cifar10 import synthetic
from ddpexp.data.cifar10.archive import read_batch
from ddpexp.data.images.dataset import load
from ddpexp.data.published_files import WrongError
from tests.data.conftest import PATIENT, Server
from tests.refusals import refused

IMAGES, LABELS = synthetic.draw(24, 1)
DEVICE = torch.device("cpu")


def batch(images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> bytes:
    """Write a mapping as Python 2 does, whose texts are bytes."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    array = b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + b"K\x00\x85" + text(b"b") + b"\x87R"
    kind = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
    shape = b"M" + struct.pack("<H", len(labels)) + b"M\x00\x0c\x86"
    state = b"(K\x01" + shape + kind + b"\x89" + text(images.tobytes()) + b"tb"
    names = b"](" + b"".join(text(b"%d.png" % number) for number in range(len(labels))) + b"e"
    ints = b"](" + b"".join(b"K%c" % label for label in labels) + b"e"
    items = text(b"batch_label") + text(b"made") + text(b"labels") + ints + text(b"data") + array + state
    return b"\x80\x02}(" + items + text(b"filenames") + names + b"u."


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return an archive of 5 x 4 + 4 pictures that passes for CIFAR-10."""
    names = (*archives.TRAIN, *archives.TEST)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for number, name in enumerate(names):
            part = slice(4 * number, 4 * number + 4)
            content = batch(IMAGES[part], LABELS[part])
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    content = stream.getvalue()
    known = replace(archives.ARCHIVE, size=len(content), sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(archives, "ARCHIVE", known)
    return content


def prepare(
    root: Path | None, source: Any, *servers: Server, warn: Callable[[str], None] = pytest.fail
) -> dict[str, Any]:
    mirrors = [server.address for server in servers]
    with mock.patch("ddpexp.data.published.print_message", warn):
        named = None if root is None else str(root)
        return files.prepare(named, source, False, False, 0, False, 30, 20, mirrors=mirrors, patience=PATIENT)


def test_a_batch_is_read_without_carrying_it_out() -> None:
    class Danger:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, ("danger",)

    part = read_batch(batch(IMAGES[:3], LABELS[:3]))
    assert part.pixels == IMAGES[:3].tobytes()
    assert part.labels == LABELS[:3].tobytes()
    with pytest.raises(WrongError, match="0 bytes and 0 labels"):
        read_batch(pickle.dumps(Danger(), protocol=2))
    assert not Path("danger").exists()
    with pytest.raises(WrongError, match="cannot be read"):
        read_batch(b"\xff not a pickle")


def test_an_archive_is_decoded_once(packed: bytes, home: Path, tmp_path: Path) -> None:
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(packed)
    found = prepare(tmp_path, "files")
    assert (found["name"], found["source"], found["num_train"], found["num_test"]) == ("cifar10", "files", 20, 4)
    assert found["facts"]["classes"][0] == "airplane"
    splits = load(found)
    images, labels = splits.train.gather(torch.arange(20), DEVICE)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (found["mean"], found["std"]))
    torch.testing.assert_close(images, (torch.from_numpy(IMAGES[:20]) / 255 - mean) / std)
    assert labels.tolist() == LABELS[:20].tolist()
    again = prepare(tmp_path, "auto")
    assert again["folder"] == found["folder"]
    assert again["facts"] == found["facts"]


def test_a_named_folder_that_does_not_exist_has_no_stand_in(packed: bytes, home: Path, tmp_path: Path) -> None:
    with refused("data.root"):
        prepare(tmp_path / "nowhere", "auto")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda content: content[:-1] + b"x", "cifar-10-python.tar.gz: right"),
        (lambda content: content[:-9], "cifar-10-python.tar.gz: bytes"),
        (lambda content: content + b"x", "cifar-10-python.tar.gz: than"),
        (lambda content: b"<html>" + content, "cifar-10-python.tar.gz: page"),
    ],
)
def test_a_wrong_archive_is_refused_whatever_the_source(
    packed: bytes, home: Path, tmp_path: Path, change: Callable[[bytes], bytes], problem: str
) -> None:
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(change(packed))
    for source in ("auto", "files", "download"):
        with refused(problem):
            prepare(tmp_path, source)


def test_a_missing_archive_is_downloaded_and_kept(packed: bytes, home: Path, tmp_path: Path, server: Server) -> None:
    with refused(f"data.root={tmp_path}: data.source=download"):
        prepare(tmp_path, "files", server)
    server.answers["cifar-10-python.tar"] = packed  # the server of the tests leaves out .gz
    assert prepare(tmp_path, "auto", server)["source"] == "download"
    assert (tmp_path / "cifar-10-python.tar.gz").read_bytes() == packed
    assert prepare(tmp_path, "auto", server)["num_train"] == 20
    assert len(server.requests) == 1


def test_drawn_pictures_stand_in_with_a_warning(packed: bytes, home: Path, tmp_path: Path, server: Server) -> None:
    warnings: list[str] = []
    server.answers["cifar-10-python.tar"] = packed[:-1] + b"x"
    found = prepare(None, "auto", server, warn=warnings.append)
    assert (found["name"], found["num_train"], found["num_test"]) == ("embedded-pictures", 30, 20)
    assert "NOT CIFAR-10" in found["note"]
    assert "THIS IS NOT CIFAR-10" in warnings[0]
    assert "SHA-256" in warnings[0]
    for source in ("auto", "download"):
        with refused(f"data.root={tmp_path}: downloaded"):
            prepare(tmp_path, source, server)


def test_drawn_pictures_are_the_same_for_every_number(home: Path) -> None:
    few, labels = synthetic.draw(10, 3)
    more, more_labels = synthetic.draw(600, 3)
    assert np.array_equal(few, more[:10])
    assert np.array_equal(labels, more_labels[:10])
    assert not np.array_equal(few, synthetic.draw(10, 4)[0])
    assert np.bincount(more_labels, minlength=10).min() > 30
