"""The four files by all their names, and every way in which one can be wrong."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.data.conftest import NAMES, TEST_IMAGES, TEST_LABELS, TRAIN_IMAGES, Server, Small, prepare, refusal, tree

pytestmark = pytest.mark.usefixtures("home")


@pytest.mark.parametrize("below", ["", "MNIST/raw", "raw"])
@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_files_are_found_by_all_their_usual_names(
    below: str, dotted: bool, packed: bool, small: Small, tmp_path: Path
) -> None:
    folder = tmp_path / "data" / below
    folder.mkdir(parents=True)
    for name in NAMES:
        usual = name.replace("-idx", ".idx") if dotted else name
        content = (small.packed if packed else small.unpacked)[name]
        (folder / (usual + ".gz" * packed)).write_bytes(content)
    identity = prepare(tmp_path / "data", "files")
    assert np.array_equal(np.load(Path(identity["folder"], "train-images.npy")), small.images)
    assert identity["note"] == f"MNIST, 20 + 10 images, from files in {folder}"


def test_gz_name_on_an_unpacked_file_is_no_problem(root: Path, small: Small) -> None:
    (root / f"{TEST_LABELS}.gz").write_bytes(small.unpacked[TEST_LABELS])
    assert prepare(root, "files")["num_test"] == 10


def test_folder_with_the_name_of_a_file_is_refused(root: Path) -> None:
    (root / TRAIN_IMAGES).mkdir()
    assert f"{root / TRAIN_IMAGES} has the name of a data file, but is not a regular file" in refusal(root, "auto")


WRONG: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty file": (lambda content: b"", "is empty"),
    "web page": (lambda content: b"\n<!DOCTYPE html><html>no</html>", "is a web page (it begins with"),
    "truncated gzip": (
        lambda content: gzip.compress(content)[:-9],
        "is cut off: its gzip data ends before the 7,856 bytes it must unpack to",
    ),
    "gzip without its checksum": (lambda content: gzip.compress(content)[:-8], "is cut off"),
    "gzip of one kilobyte": (lambda content: gzip.compress(content)[:1000], "is cut off"),
    "damaged gzip": (lambda content: gzip.compress(content)[:-8] + b"12345678", "is damaged: its gzip data"),
    "gzip followed by junk": (lambda content: gzip.compress(content) + b"junk", "is damaged: its gzip data"),
    "not a deflate stream": (lambda content: b"\x1f\x8b\x08\0\0\0\0\0\0\0" + b"\xff" * 50, "is damaged: its gzip data"),
    "labels for images": (
        lambda content: gzip.compress(b"\0\0\x08\x01" + content[4:]),
        "begins with the magic number 2049, not 2051",
    ),
    "text": (lambda content: b"not found", "begins with the magic number 1852797984, not 2051"),
    "three bytes": (lambda content: b"\0\0\x08", "has 3 bytes, not 7,856"),
    "one byte less": (lambda content: content[:-1], "has 7,855 bytes, not 7,856"),
    "one byte more": (lambda content: gzip.compress(content + b"\0"), "has more than 7,856 bytes once unpacked"),
    "other content": (lambda content: content[:-1] + b"\x07", "has the right size but the SHA-256"),
}


@pytest.mark.fault(57, "S11")
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("source", ["files", "auto", "download"])
def test_wrong_file_is_refused_with_its_name_and_fault(
    wrong: str, source: str, root: Path, small: Small, server: Server
) -> None:
    spoil, fault = WRONG[wrong]
    server.answers |= small.packed
    path = root / f"{TEST_IMAGES}.gz"
    path.write_bytes(spoil(small.unpacked[TEST_IMAGES]))
    text = refusal(root, source, server)
    assert text.startswith(f"{path} {fault}")
    assert "data.source=download" in text
    assert not server.requests
    assert tree(root) == {f"{name}.gz" for name in NAMES}


@pytest.mark.fault(57, "S11")
def test_gzip_bomb_is_refused_after_a_little_of_it(root: Path, small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / f"{TEST_IMAGES}.gz").write_bytes(gzip.compress(small.unpacked[TEST_IMAGES][:16] + bytes(300_000_000), 1))
    unpacked = 0
    read = gzip.GzipFile.read

    def counting(self: gzip.GzipFile, size: int | None = -1) -> bytes:
        nonlocal unpacked
        content = read(self, size)
        unpacked += len(content)
        return content

    monkeypatch.setattr(gzip.GzipFile, "read", counting)
    assert f"{TEST_IMAGES}.gz has more than 7,856 bytes once unpacked" in refusal(root, "files")
    assert unpacked < 3_000_000


def test_unreadable_file_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = root / f"{TRAIN_IMAGES}.gz"
    path.unlink()
    path.symlink_to(path.name)  # a link to itself: unreadable for root too
    assert f"{path} cannot be accessed (Too many levels of symbolic links)" in refusal(root, "files")
