"""Preparing MNIST: found, checked, fetched and cached, with a small set in place of the real one where that is enough.

The network is a server on 127.0.0.1; a look-up of any other host fails the test.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpexp.data import digits, mnist_files
from ddpexp.data.mnist_files import Patience
from ddpexp.errors import RefusedError

TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = (file.name for file in mnist_files.FILES)
NAMES = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)
QUICK = Patience(first=0.5, stall=0.5, total=2.0)
REPOSITORY = Path(__file__).resolve().parents[2]


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
    asked: list[str] = field(default_factory=list)


@pytest.fixture(autouse=True)
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
    arrays = [*digits.draw(20, 1), *digits.draw(10, 2)]
    for file, array in zip(mnist_files.FILES, arrays, strict=True):
        shaped = replace(file, shape=array.shape)
        unpacked[file.name] = shaped.header + array.tobytes()
        files.append(replace(shaped, sha256=hashlib.sha256(unpacked[file.name]).hexdigest()))
    monkeypatch.setattr(mnist_files, "FILES", tuple(files))
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
def mnist() -> Path:
    folder = Path(os.environ.get("DDPEXP_TEST_MNIST", REPOSITORY.parent / "shared" / "data" / "mnist"))
    if not all((folder / f"{name}.gz").is_file() for name in NAMES):
        pytest.skip("the MNIST files are not there: set DDPEXP_TEST_MNIST to their folder")
    return folder


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
            server.asked.append(name)
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


def prepare(root: Path | str | None, source: str, *servers: Server, warn: Callable[[str], None] | None = None) -> Any:
    mirrors = [server.address for server in servers]
    return mnist_files.prepare(
        None if root is None else str(root), source, 30, 20, warn or pytest.fail, mirrors=mirrors, patience=QUICK
    )


def refusal(root: Path | str | None, source: str, *servers: Server) -> str:
    with pytest.raises(RefusedError) as error:
        prepare(root, source, *servers)
    assert "\n" not in str(error.value)
    return str(error.value)


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# --- The real thing ---


def test_mnist_is_decoded_into_arrays_that_map_into_memory(mnist: Path, tmp_path: Path, home: Path) -> None:
    root = tmp_path / "mnist"
    root.mkdir()
    for name in NAMES:
        (root / f"{name}.gz").symlink_to(mnist / f"{name}.gz")
    identity = prepare(root, "files")
    assert identity == {
        "name": "mnist",
        "source": "files",
        "folder": identity["folder"],
        "sha256": "ca679089cd9dd461d7b26e36e51216fc71f9271f8082e09656a7c1d29a50483b",
        "num_train": 60_000,
        "num_test": 10_000,
        "note": f"MNIST, 60,000 + 10,000 images, from files in {root}",
    }
    folder = Path(identity["folder"])
    assert folder == root / ".ddpexp-cache" / "mnist-ca679089cd9d"
    for name, cached, skip in zip(
        NAMES, ("train-images", "train-labels", "test-images", "test-labels"), (16, 8, 16, 8), strict=True
    ):
        array = np.load(folder / f"{cached}.npy", mmap_mode="r")
        assert isinstance(array, np.memmap)
        assert array.dtype == np.uint8
        assert array.flags.c_contiguous
        assert array.offset % 64 == 0, "mapped rows are read faster from an aligned start"
        assert array.tobytes() == gzip.decompress((mnist / f"{name}.gz").read_bytes())[skip:]
    assert array[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert not home.exists()
    assert prepare(root, "auto") == identity

    def seconds() -> float:
        begin = time.perf_counter()
        prepare(root, "auto")
        return time.perf_counter() - begin

    assert min(seconds() for _ in range(10)) < 0.005

    # One changed pixel, packed anew: right magic number, right size.
    content = bytearray(gzip.decompress((mnist / f"{TEST_IMAGES}.gz").read_bytes()))
    content[5000] ^= 1
    (root / f"{TEST_IMAGES}.gz").unlink()
    (root / f"{TEST_IMAGES}.gz").write_bytes(gzip.compress(bytes(content), 1))
    text = refusal(root, "auto")
    assert f"{root / TEST_IMAGES}.gz has the right size but the SHA-256 {hashlib.sha256(content).hexdigest()}" in text
    assert "not 0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7" in text


# --- Finding files ---


@pytest.mark.parametrize("below", ["", "MNIST/raw", "raw"])
@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_files_are_found_by_all_their_usual_names(below: str, dotted: bool, packed: bool, small: Small, tmp_path: Path) -> None:
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


def test_data_folder_comes_from_the_environment_when_none_is_typed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPEXP_DATA", str(root))
    assert Path(prepare(None, "files")["folder"]).parent.parent == root


def test_data_folder_is_the_users_cache_when_nothing_names_one(root: Path, home: Path) -> None:
    home.parent.mkdir()
    root.rename(home)
    assert Path(prepare(None, "files")["folder"]).parent.parent == home


def test_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert mnist_files.user_cache() == tmp_path / ".cache" / "ddpexp"


@pytest.mark.parametrize("source", ["", "web", "Files"])
def test_unknown_source_is_refused_with_the_choices(source: str, root: Path) -> None:
    assert refusal(root, source).startswith(f"data.source={source} is not a source of data: set one of auto, files")


@pytest.mark.parametrize("num", [0, -1, 10**9])
def test_impossible_number_of_drawn_digits_is_refused(num: int) -> None:
    with pytest.raises(RefusedError, match=f"data.embedded_test={num} is no number of digits"):
        mnist_files.prepare(None, "embedded", 10, num)


def test_data_folder_that_is_a_file_is_refused(tmp_path: Path, small: Small) -> None:
    path = tmp_path / "file"
    path.touch()
    assert f"data.root={path} is not a folder" in refusal(path, "auto")
    assert f"data.root={path}/below cannot be used (Not a directory)" in refusal(path / "below", "auto")


@pytest.mark.parametrize("text", ["", "a\0b"])
def test_text_that_names_no_folder_is_refused(text: str) -> None:
    assert "names no folder" in refusal(text, "files")


def test_files_that_are_absent_are_refused(tmp_path: Path, small: Small) -> None:
    text = refusal(tmp_path / "nowhere", "files")
    assert f"data.root={tmp_path / 'nowhere'} holds 0 of the four MNIST files" in text
    assert all(name in text for name in NAMES)
    assert "data.source=download" in text
    assert not (tmp_path / "nowhere").exists()


def test_some_missing_files_are_named(root: Path) -> None:
    (root / f"{TRAIN_LABELS}.gz").unlink()
    (root / f"{TEST_IMAGES}.gz").unlink()
    text = refusal(root, "files")
    assert "holds 2 of the four" in text
    assert f"add {TRAIN_LABELS}, {TEST_IMAGES} there" in text


def test_partial_set_is_never_replaced_by_drawn_digits(root: Path, server: Server, home: Path) -> None:
    (root / f"{TRAIN_LABELS}.gz").unlink()
    text = refusal(root, "auto", server)
    assert f"add {TRAIN_LABELS} there" in text
    assert "HTTP Error 404" in text
    assert not list(home.rglob("*.npy"))


def test_folder_with_the_name_of_a_file_is_refused(root: Path) -> None:
    (root / TRAIN_IMAGES).mkdir()
    assert f"{root / TRAIN_IMAGES} is not a regular file" in refusal(root, "auto")


# --- Wrong files ---

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


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("source", ["files", "auto", "download"])
def test_wrong_file_is_refused_with_its_name_and_fault(wrong: str, source: str, root: Path, small: Small, server: Server) -> None:
    spoil, fault = WRONG[wrong]
    server.answers |= small.packed
    path = root / f"{TEST_IMAGES}.gz"
    path.write_bytes(spoil(small.unpacked[TEST_IMAGES]))
    text = refusal(root, source, server)
    assert text.startswith(f"{path} {fault}")
    assert f"replace it by the true {TEST_IMAGES}, or delete it and set data.source=download" in text
    assert not server.asked
    assert tree(root) == {f"{name}.gz" for name in NAMES}


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
    assert f"{path} cannot be looked at (Too many levels of symbolic links)" in refusal(root, "files")


# --- The cache ---


def test_ready_cache_is_used_without_reading_the_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = prepare(root, "files")
    monkeypatch.setattr(mnist_files, "_unpack", pytest.fail)
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
    monkeypatch.setattr(mnist_files, "_unpack", pytest.fail)
    assert prepare(root, "files") == identity, "the new stamps were not kept"


def test_cache_is_enough_once_the_files_are_gone_unless_files_are_asked_for(root: Path) -> None:
    identity = prepare(root, "files")
    for name in NAMES:
        (root / f"{name}.gz").unlink()
    assert prepare(root, "auto") == identity
    assert "holds 0 of the four" in refusal(root, "files")


@pytest.mark.parametrize("damage", ["truncated array", "no array", "no identity", "torn identity", "other format"])
def test_damaged_cache_is_built_again(damage: str, root: Path, small: Small) -> None:
    folder = Path(prepare(root, "files")["folder"])
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    array, identity = folder / "train-images.npy", folder / "identity.json"
    if damage == "truncated array":
        os.truncate(array, 100)
    elif damage == "no array":
        array.unlink()
    elif damage == "no identity":
        identity.unlink()
    elif damage == "torn identity":
        identity.write_bytes(whole["identity.json"][:50])
    else:
        identity.write_text(json.dumps(json.loads(identity.read_text()) | {"format": 0}))
    assert prepare(root, "files")["folder"] == str(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert os.listdir(folder.parent) == [folder.name]


def test_racing_processes_leave_one_complete_cache(root: Path, mnist: Path) -> None:
    code = (
        "import json, sys, time; from ddpexp.data.mnist_files import prepare; "
        "time.sleep(max(0, float(sys.argv[2]) - time.time())); "
        "print(json.dumps(prepare(sys.argv[1], 'files')))"
    )
    for path in root.iterdir():
        path.unlink()
    for name in NAMES:
        (root / f"{name}.gz").symlink_to(mnist / f"{name}.gz")
    command = [sys.executable, "-c", code, str(root), str(time.time() + 0.5)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY) for _ in range(3)]
    identities = [json.loads(process.communicate(timeout=60)[0]) for process in running]
    assert identities[0] == identities[1] == identities[2]
    folder = Path(identities[0]["folder"])
    assert os.listdir(folder.parent) == [folder.name]
    assert np.load(folder / "train-images.npy", mmap_mode="r").shape == (60_000, 28, 28)


def test_cache_of_a_faster_process_is_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    move_in = mnist_files._move_in
    first: list[int] = []

    def late(whole: Path, folder: Path, temp: Path) -> None:
        shutil.copytree(whole, folder)
        first.append(folder.stat().st_ino)
        move_in(whole, folder, temp)

    monkeypatch.setattr(mnist_files, "_move_in", late)
    folder = Path(prepare(root, "files")["folder"])
    assert [folder.stat().st_ino] == first
    assert os.listdir(folder.parent) == [folder.name]


def test_old_leftovers_of_killed_processes_are_cleared_and_young_ones_kept(root: Path) -> None:
    caches = root / ".ddpexp-cache"
    for name in (".tmp-old", ".tmp-young", "mine"):
        (caches / name).mkdir(parents=True)
        (caches / name / "part.npy").write_bytes(b"part")
    for name in (".tmp-old", "mine"):
        os.utime(caches / name, (time.time() - 4000,) * 2)
    folder = Path(prepare(root, "files")["folder"])
    assert set(os.listdir(caches)) == {folder.name, ".tmp-young", "mine"}


def test_link_in_place_of_the_cache_is_replaced_and_its_target_left_alone(root: Path, tmp_path: Path) -> None:
    folder = Path(prepare(root, "files")["folder"])
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    before = tree(elsewhere)
    (elsewhere / "precious").touch()
    folder.symlink_to(elsewhere)
    assert prepare(root, "files")["folder"] == str(folder)
    assert not folder.is_symlink()
    assert tree(elsewhere) == before | {"precious"}


def test_link_in_place_of_the_folder_of_caches_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (root / ".ddpexp-cache").symlink_to(tmp_path / "elsewhere")
    assert f"{root / '.ddpexp-cache'} is a link or a file" in refusal(root, "files")
    assert not tree(tmp_path / "elsewhere")


def fail_below(folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every creation below a folder fail, as on a full or read-only disk (root may write anywhere)."""
    for owner, name in ((os, "mkdir"), (mnist_files, "_write")):
        real = getattr(owner, name)

        def failing(path: Any, *rest: Any, real: Callable[..., Any] = real, **more: Any) -> Any:
            if Path(path).is_relative_to(folder):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *rest, **more)

        monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("number", [13, 28, 30])  # permission denied, disk full, read-only
def test_cache_goes_to_the_user_where_the_data_folder_cannot_be_written(
    number: int, root: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_below(root, number, monkeypatch)
    identity = prepare(root, "files")
    assert Path(identity["folder"]).parent.parent == home
    assert home.stat().st_mode & 0o777 == 0o700
    assert Path(identity["folder"]).stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(mnist_files, "_unpack", pytest.fail)
    assert prepare(root, "files") == identity


def test_disk_that_is_full_everywhere_is_refused(root: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_below(root.parent, 28, monkeypatch)
    text = refusal(root, "files")
    assert f"{root}: No space left on device; {home}: No space left on device" in text
    assert "set XDG_CACHE_HOME" in text


def test_full_disk_half_way_leaves_nothing(root: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = mnist_files._write

    def failing(path: Path, *parts: bytes | memoryview) -> None:
        if path.name == "test-images.npy":
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write(path, *parts)

    monkeypatch.setattr(mnist_files, "_write", failing)
    assert "No space left on device" in refusal(root, "files")
    assert not tree(root / ".ddpexp-cache") | tree(home / ".ddpexp-cache")


def test_cache_of_one_folder_does_not_answer_for_another(
    root: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_below(root, 30, monkeypatch)
    prepare(root, "files")
    assert "holds 0 of the four" in refusal(tmp_path / "other", "files")
    assert prepare(tmp_path / "other", "auto")["note"] == f"MNIST, 20 + 10 images, from files in {root}"


# --- The network ---


def test_download_keeps_the_files_and_says_so(small: Small, server: Server, tmp_path: Path) -> None:
    server.answers |= small.packed
    root = tmp_path / "new"
    identity = prepare(root, "download", server)
    assert identity["source"] == "download"
    assert identity["note"] == f"MNIST, 20 + 10 images, downloaded to {root}"
    assert server.asked == list(NAMES)
    assert {name: (root / f"{name}.gz").read_bytes() for name in NAMES} == small.packed
    assert set(os.listdir(root)) == {".ddpexp-cache", *(f"{name}.gz" for name in NAMES)}
    assert prepare(root, "download", server) == prepare(root, "auto", server) == identity
    assert prepare(root, "files")["source"] == "files"
    assert len(server.asked) == 4


def test_auto_downloads_without_a_warning(small: Small, server: Server, tmp_path: Path) -> None:
    server.answers |= small.packed
    assert prepare(tmp_path / "new", "auto", server)["source"] == "download"


@pytest.mark.parametrize("source", ["auto", "download"])
def test_only_what_is_missing_is_downloaded(source: str, root: Path, small: Small, server: Server) -> None:
    server.answers |= small.packed
    (root / f"{TRAIN_LABELS}.gz").unlink()
    assert prepare(root, source, server)["name"] == "mnist"
    assert server.asked == [TRAIN_LABELS]


def test_link_in_place_of_a_download_is_replaced_not_followed(small: Small, server: Server, tmp_path: Path) -> None:
    server.answers |= small.packed
    root = tmp_path / "new"
    root.mkdir()
    (root / f"{TRAIN_LABELS}.gz").symlink_to(tmp_path / "target")
    prepare(root, "download", server)
    assert not (tmp_path / "target").exists()
    assert not (root / f"{TRAIN_LABELS}.gz").is_symlink()


def test_download_goes_to_the_user_where_the_data_folder_cannot_be_written(
    small: Small, server: Server, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers |= small.packed
    fail_below(tmp_path / "data", 30, monkeypatch)
    identity = prepare(tmp_path / "data", "download", server)
    assert identity["note"].endswith(f"downloaded to {home}")
    shutil.rmtree(identity["folder"])
    assert prepare(tmp_path / "data", "auto", server)["name"] == "mnist"
    assert len(server.asked) == 4


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
    time.sleep(2)


def silent(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(2)


BAD_ANSWERS: dict[str, tuple[Callable[[bytes], Any], str]] = {
    "404": (lambda content: None, "HTTP Error 404"),
    "empty": (lambda content: b"", "is empty, not data"),
    "web page": (lambda content: b"<html>log in first</html>", "is a web page, not data"),
    "truncated": (lambda content: hang_up_early(gzip.compress(content)), "is cut off"),
    "endless": (lambda content: endless, "goes on after 7,856 bytes"),
    "dripping": (lambda content: dripping, "came too slowly"),
    "stalling": (lambda content: stalling, "stopped coming after 3 bytes"),
    "silent": (lambda content: silent, "no answer from|timed out"),
    "wrong content": (lambda content: gzip.compress(content[:-1] + b"\x07"), "SHA-256"),
}


@pytest.mark.parametrize("bad", BAD_ANSWERS)
def test_bad_mirror_is_refused_in_time_and_nothing_of_it_kept(bad: str, small: Small, server: Server, tmp_path: Path) -> None:
    make, fault = BAD_ANSWERS[bad]
    server.answers |= small.packed | {TEST_IMAGES: make(small.unpacked[TEST_IMAGES])}
    begin = time.monotonic()
    text = refusal(tmp_path / "new", "download", server)
    assert time.monotonic() - begin < QUICK.total + 1.5
    assert text.startswith("MNIST could not be downloaded (")
    assert server.address in text
    assert re.search(fault, text)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("bad", sorted(BAD_ANSWERS.keys() - {"dripping"}))  # which uses up the time of all mirrors
def test_second_mirror_serves_where_the_first_is_bad(
    bad: str, small: Small, server: Server, other_server: Server, tmp_path: Path
) -> None:
    make, _ = BAD_ANSWERS[bad]
    server.answers |= {TRAIN_LABELS: make(small.unpacked[TEST_IMAGES])} | {
        name: content for name, content in small.packed.items() if name != TRAIN_LABELS
    }
    other_server.answers |= small.packed
    assert prepare(tmp_path / "new", "download", server, other_server)["num_train"] == 20
    assert other_server.asked[0] == TRAIN_LABELS


def test_closed_port_falls_back_to_drawn_digits_with_one_loud_line(small: Small, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = Server(f"http://127.0.0.1:{unused.getsockname()[1]}/")
        warnings: list[str] = []
        identity = prepare(tmp_path / "new", "auto", nobody, warn=warnings.append)
    assert identity["name"] == "embedded-digits"
    assert identity["source"] == "embedded"
    (text,) = warnings
    assert text.startswith(f"THIS IS NOT MNIST: data.root={tmp_path / 'new'} holds none of its files")
    assert "30 + 20 drawn digits" in text
    assert "Connection refused" in text
    assert "data.source=download" in text
    assert "\n" not in text
    assert not (tmp_path / "new").exists()


def test_name_look_up_that_hangs_is_cut_off(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def hanging(*_: Any, **__: Any) -> Any:
        released.wait(20)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    warnings: list[str] = []
    begin = time.monotonic()
    prepare(tmp_path, "auto", Server("http://one.invalid/"), Server("http://two.invalid/"), warn=warnings.append)
    assert QUICK.first <= time.monotonic() - begin < QUICK.first + 2
    released.set()
    assert "no answer from http://one.invalid/, http://two.invalid/ within" in warnings[0]


def test_auto_tries_a_failed_download_again_only_after_a_while(small: Small, server: Server, tmp_path: Path, home: Path) -> None:
    warnings: list[str] = []
    prepare(tmp_path / "new", "auto", server, warn=warnings.append)
    server.answers |= small.packed
    assert prepare(tmp_path / "new", "auto", server, warn=warnings.append)["source"] == "embedded"
    assert len(server.asked) == 1
    assert "tried less than 10 minutes ago" in warnings[1]
    assert "HTTP Error 404" in warnings[1]
    note = home / ".ddpexp-cache" / "download-failed"
    os.utime(note, (time.time() - 700,) * 2)
    assert prepare(tmp_path / "new", "auto", server)["source"] == "download"
    assert not note.exists()


def test_download_is_tried_at_once_when_asked_for(small: Small, server: Server, tmp_path: Path) -> None:
    prepare(tmp_path / "new", "auto", server, warn=lambda _: None)
    server.answers |= small.packed
    assert prepare(tmp_path / "new", "download", server)["source"] == "download"


def test_auto_waits_five_seconds_at_most_for_first_bytes() -> None:
    assert mnist_files.AUTO_PATIENCE.first == 5.0


# --- Drawn digits ---


def test_drawn_digits_are_cached_by_version_and_numbers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = mnist_files.prepare(None, "embedded", 30, 20)
    folder = home / ".ddpexp-cache" / "embedded-v1-30-20"
    assert identity["folder"] == str(folder)
    assert identity["note"] == "drawn digits (NOT MNIST), 30 + 20 images, embedded in ddpexp"
    for part, num, seed in (("train", 30, 1), ("test", 20, 2)):
        images, labels = digits.draw(num, seed)
        assert np.array_equal(np.load(folder / f"{part}-images.npy", mmap_mode="r"), images)
        assert np.array_equal(np.load(folder / f"{part}-labels.npy", mmap_mode="r"), labels)
    more = mnist_files.prepare(None, "embedded", 31, 20)
    assert more["folder"] != identity["folder"]
    assert more["sha256"] != identity["sha256"]
    monkeypatch.setattr(digits, "draw", pytest.fail)
    assert mnist_files.prepare(None, "embedded", 30, 20) == identity
    json.dumps(identity)


def test_drawn_digits_without_a_writable_cache_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_below(home.parent, 13, monkeypatch)
    assert f"{home}: Permission denied" in refusal(None, "embedded")


def test_warning_goes_to_standard_error_by_default(
    small: Small, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mnist_files.prepare(str(tmp_path), "auto", 5, 5, mirrors=[server.address], patience=QUICK)
    captured = capsys.readouterr()
    assert captured.err.startswith("WARNING: THIS IS NOT MNIST")
    assert not captured.out


def test_import_needs_the_standard_library_only() -> None:
    code = "import sys, ddpexp.data.mnist_files; print({'numpy', 'torch', 'urllib.request'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
