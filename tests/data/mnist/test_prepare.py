"""Which way MNIST comes: from the cache, the files, the network or the pen, and what is said of it."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ddpexp.data.mnist import prepare as mnist_files
from ddpexp.data.mnist import synthetic
from ddpexp.data.published_files import PublishedFile
from tests.conftest import ROOT
from tests.data.conftest import NAMES, PATIENT, TEST_IMAGES, TRAIN_LABELS, Server, Small, prepare, refusal

pytestmark = pytest.mark.usefixtures("home")


def test_mnist_is_decoded_into_arrays_that_map_into_memory(real: Path, home: Path) -> None:
    identity = prepare(real, "files")
    assert identity == {
        "name": "mnist",
        "source": "files",
        "folder": identity["folder"],
        "sha256": "ca679089cd9dd461d7b26e36e51216fc71f9271f8082e09656a7c1d29a50483b",
        "num_train": 60_000,
        "num_test": 10_000,
        "note": f"MNIST, 60,000 + 10,000 images, from files in {real}",
        "mean": [0.1307],
        "std": [0.3081],
        "facts": {
            "num_classes": 10,
            "classes": list("0123456789"),
            "shape": [1, 28, 28],
            "mean": [0.1307],
            "std": [0.3081],
        },
    }
    folder = Path(identity["folder"])
    assert folder == real / ".ddpexp-cache" / "mnist-ca679089cd9d"
    for name, cached, skip in zip(
        NAMES, ("train-images", "train-labels", "test-images", "test-labels"), (16, 8, 16, 8), strict=True
    ):
        array = np.load(folder / f"{cached}.npy", mmap_mode="r")
        assert isinstance(array, np.memmap)
        assert array.dtype == np.uint8
        assert array.flags.c_contiguous
        assert array.offset % 64 == 0, "mapped rows are read faster from an aligned start"
        assert array.tobytes() == gzip.decompress((real / f"{name}.gz").read_bytes())[skip:]
    assert array[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert os.listdir(home) == ["verified"], "the cache lies beside the files"
    before = bytes_read()
    assert prepare(real, "auto") == identity
    assert bytes_read() - before < 100_000, "of the eleven megabytes that the files have"

    # One changed pixel, packed anew: right magic number, right size.
    content = bytearray(gzip.decompress((real / f"{TEST_IMAGES}.gz").read_bytes()))
    content[5000] ^= 1
    (real / f"{TEST_IMAGES}.gz").unlink()
    (real / f"{TEST_IMAGES}.gz").write_bytes(gzip.compress(bytes(content), 1))
    text = refusal(real, "auto")
    assert f"{real / TEST_IMAGES}.gz has the right size but the SHA-256 {hashlib.sha256(content).hexdigest()}" in text
    assert "not 0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7" in text


def bytes_read() -> int:
    """Return how much this process has read from files."""
    return int(Path("/proc/self/io").read_text().split()[1])  # Source: proc(5), rchar


def test_data_folder_comes_from_the_environment_when_none_is_given(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPEXP_DATA", str(root))
    assert Path(prepare(None, "files")["folder"]).parent.parent == root


def test_data_folder_is_the_users_cache_when_nothing_names_one(root: Path, home: Path) -> None:
    home.parent.mkdir()
    root.rename(home)
    assert Path(prepare(None, "files")["folder"]).parent.parent == home


def test_data_folder_that_is_a_file_is_refused(tmp_path: Path, small: Small) -> None:
    path = tmp_path / "file"
    path.touch()
    assert f"data.root={path} is not a folder" in refusal(path, "auto")
    assert f"data.root={path}/below cannot be used (Not a directory)" in refusal(path / "below", "auto")


@pytest.mark.parametrize("text", ["", "a\0b"])
def test_text_that_names_no_folder_is_refused(text: str) -> None:
    assert "names no folder" in refusal(text, "files")


# --- Files and cache ---


def test_a_named_folder_that_does_not_exist_has_no_stand_in(small: Small, server: Server, tmp_path: Path) -> None:
    server.answers |= small.packed
    for source in ("auto", "files", "embedded"):
        text = refusal(tmp_path / "nowhere", source, server)
        assert text.startswith(f"data.root={tmp_path / 'nowhere'} does not exist.")
        assert ("data.source=download" in text) == (source != "embedded")
    assert server.requests == []
    assert prepare(tmp_path / "nowhere", "download", server)["source"] == "download"


def test_files_that_are_absent_are_refused(tmp_path: Path, small: Small) -> None:
    (tmp_path / "empty").mkdir()
    text = refusal(tmp_path / "empty", "files")
    assert f"data.root={tmp_path / 'empty'} holds 0 of 4 files of MNIST" in text
    assert all(name in text for name in NAMES)
    assert "data.source=download" in text
    assert not list((tmp_path / "empty").iterdir())


def test_a_named_folder_has_no_stand_in_where_nothing_can_be_downloaded(
    small: Small, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    for source in ("auto", "download"):
        text = refusal(tmp_path / "empty", source, server)
        assert text.startswith(f"data.root={tmp_path / 'empty'} holds none of the files of MNIST")
        assert "404" in text
    monkeypatch.setenv("DDPEXP_DATA", str(tmp_path / "nowhere"))
    assert refusal(None, "auto", server).startswith(f"$DDPEXP_DATA={tmp_path / 'nowhere'} holds none of the files")
    monkeypatch.setenv("DDPEXP_DATA", str(tmp_path / "empty"))  # such as the volume of a container
    assert prepare(None, "auto", server, warn=lambda _: None)["name"] == "embedded-digits"
    server.answers |= small.packed
    assert prepare(tmp_path / "empty", "download", server)["source"] == "download"


@pytest.mark.parametrize("source", ["auto", "files", "download"])
def test_a_given_folder_of_other_images_is_refused_and_mnist_does_not_replace_it(
    tmp_path: Path, small: Small, root: Path, source: str
) -> None:
    (tmp_path / "mine/train/cat").mkdir(parents=True)
    (tmp_path / "mine/train/cat/a.png").touch()
    text = refusal(tmp_path / "mine", source)
    assert text.startswith(
        f"data.root={tmp_path / 'mine'} holds folders of images such as train/cat/a.png, but none of the four MNIST"
    )
    (root / "a.png").touch()
    assert prepare(root, "files")["name"] == "mnist"


def test_some_missing_files_are_named(root: Path) -> None:
    (root / f"{TRAIN_LABELS}.gz").unlink()
    (root / f"{TEST_IMAGES}.gz").unlink()
    text = refusal(root, "files")
    assert "holds 2 of 4 files" in text
    assert f"needs {TRAIN_LABELS}, {TEST_IMAGES}" in text


def test_partial_set_is_never_replaced_by_drawn_digits(root: Path, server: Server, home: Path) -> None:
    (root / f"{TRAIN_LABELS}.gz").unlink()
    text = refusal(root, "auto", server)
    assert f"needs {TRAIN_LABELS}" in text
    assert "HTTP Error 404" in text
    assert not list(home.rglob("*.npy"))


def test_ready_cache_is_used_without_reading_the_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = prepare(root, "files")
    monkeypatch.setattr(PublishedFile, "read", pytest.fail)
    for source in ("files", "auto", "download"):
        assert prepare(root, source) == identity


def test_changed_file_is_checked_again(root: Path, small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = prepare(root, "files")
    path = root / f"{TRAIN_LABELS}.gz"
    path.write_bytes(gzip.compress(small.unpacked[TRAIN_LABELS], 1, mtime=77))
    assert prepare(root, "files") == identity
    path.write_bytes(b"wrong now")
    assert "magic number" in refusal(root, "auto")
    path.write_bytes(small.packed[TRAIN_LABELS])
    os.utime(path, ns=(1, 1))
    assert prepare(root, "files") == identity
    monkeypatch.setattr(PublishedFile, "read", pytest.fail)
    assert prepare(root, "files") == identity, "the new stamps were not kept"


def test_cache_is_enough_once_the_files_are_gone_unless_files_are_required(root: Path) -> None:
    identity = prepare(root, "files")
    for name in NAMES:
        (root / f"{name}.gz").unlink()
    assert prepare(root, "auto") == identity
    assert "holds 0 of 4 files" in refusal(root, "files")


# --- The network ---


def test_download_keeps_the_files_and_says_so(small: Small, server: Server, tmp_path: Path) -> None:
    server.answers |= small.packed
    root = tmp_path / "new"
    identity = prepare(root, "download", server)
    assert identity["source"] == "download"
    assert identity["note"] == f"MNIST, 20 + 10 images, downloaded to {root}"
    assert server.requests == list(NAMES)
    assert {name: (root / f"{name}.gz").read_bytes() for name in NAMES} == small.packed
    assert set(os.listdir(root)) == {".ddpexp-cache", *(f"{name}.gz" for name in NAMES)}
    assert prepare(root, "download", server) == prepare(root, "auto", server) == identity
    assert prepare(root, "files")["source"] == "files"
    assert len(server.requests) == 4


def test_auto_downloads_without_a_warning(small: Small, server: Server, tmp_path: Path) -> None:
    server.answers |= small.packed
    assert prepare(tmp_path, "auto", server)["source"] == "download"


@pytest.mark.parametrize("source", ["auto", "download"])
def test_only_what_is_missing_is_downloaded(source: str, root: Path, small: Small, server: Server) -> None:
    server.answers |= small.packed
    (root / f"{TRAIN_LABELS}.gz").unlink()
    assert prepare(root, source, server)["name"] == "mnist"
    assert server.requests == [TRAIN_LABELS]


def test_closed_port_falls_back_to_drawn_digits_with_one_loud_line(small: Small, home: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = Server(f"http://127.0.0.1:{unused.getsockname()[1]}/")
        warnings: list[str] = []
        identity = prepare(None, "auto", nobody, warn=warnings.append)
    assert identity["name"] == "embedded-digits"
    assert identity["source"] == "embedded"
    (text,) = warnings
    assert text.startswith(f"WARNING: THIS IS NOT MNIST: data.root={home} holds none of its files")
    assert "30 + 20 synthetic digits" in text
    assert "Connection refused" in text
    assert "data.source=download" in text
    assert "\n" not in text


# --- Drawn digits ---


def test_drawn_digits_are_cached_by_version_and_numbers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = mnist_files.prepare(None, "embedded", 30, 20)
    folder = home / ".ddpexp-cache" / "embedded-v1-30-20"
    assert identity["folder"] == str(folder)
    assert identity["note"] == "synthetic digits (NOT MNIST), 30 + 20 images, embedded in ddpexp"
    for part, num, seed in (("train", 30, 1), ("test", 20, 2)):
        images, labels = synthetic.draw(num, seed)
        assert np.array_equal(np.load(folder / f"{part}-images.npy", mmap_mode="r"), images)
        assert np.array_equal(np.load(folder / f"{part}-labels.npy", mmap_mode="r"), labels)
    more = mnist_files.prepare(None, "embedded", 31, 20)
    assert more["folder"] != identity["folder"]
    assert more["sha256"] != identity["sha256"]
    monkeypatch.setattr(synthetic, "draw", pytest.fail)
    assert mnist_files.prepare(None, "embedded", 30, 20) == identity
    json.dumps(identity)


def test_warning_goes_to_standard_error_by_default(
    small: Small, server: Server, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mnist_files.prepare(None, "auto", 5, 5, mirrors=[server.address], patience=PATIENT)
    captured = capsys.readouterr()
    assert captured.err.startswith("WARNING: THIS IS NOT MNIST")
    assert not captured.out


def test_import_needs_the_standard_library_only() -> None:
    code = "import sys, ddpexp.data.mnist.prepare; print({'numpy', 'torch', 'urllib.request'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
