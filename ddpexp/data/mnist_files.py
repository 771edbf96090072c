"""MNIST on disk: find or fetch the four IDX files, check them, and decode them once into memory-mappable `.npy` files.

The rules, in the order they apply:

- A file that is there but wrong is always refused; nothing stands in for it.
- `files` takes what is there. `download` fetches what is missing. `auto` does the same, and only where there is none of
  the four files and no download succeeds does it fall back to drawn digits, with a warning.
- Every content is checked against its SHA-256 before it is used, so the cache is named by what it holds.
- The cache lies in the data folder where that can be written, else in the user's cache folder.

Standard library only, and quick to import: the launching command imports this file.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gzip
import hashlib
import io
import json
import math
import os
import queue
import shutil
import stat
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar

from ddpexp.errors import RefusedError

if TYPE_CHECKING:
    from http.client import HTTPResponse

T = TypeVar("T")

SOURCES = ("auto", "files", "download", "embedded")
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
EMBEDDED_VERSION = 1  # raise it when digits.py draws differently: caches are named by it
EMBEDDED_SEEDS = (1, 2)  # of the training and of the test digits
EMBEDDED_MOST = 1_000_000  # images per part: they are drawn in memory

_FORMAT = 1  # of identity.json
_CACHES = ".ddpexp-cache"
_TEMP = ".tmp-"
_IDENTITY = "identity.json"
_FAILURE = "download-failed"
_STALE_AFTER = 3600.0  # seconds: no living process keeps a temporary folder that long
_RETRY_AFTER = 600.0  # seconds: `auto` without a network must not wait for one at every start
_CHUNK = 1 << 16


@dataclass(frozen=True)
class IdxFile:
    """One of the four files: its name, its name in the cache, and what it must hold once unpacked."""

    name: str
    cached: str
    shape: tuple[int, ...]
    sha256: str

    @property
    def header(self) -> bytes:
        """The IDX header: the magic number (bytes, so many dimensions), then each dimension."""
        return struct.pack(f">{1 + len(self.shape)}I", 0x0800 + len(self.shape), *self.shape)

    @property
    def size(self) -> int:
        """Size of the unpacked file.

        Units: bytes.
        """
        return len(self.header) + math.prod(self.shape)


# Source: the SHA-256 of the unpacked files of Yann LeCun's MNIST.
FILES = (
    IdxFile(
        "train-images-idx3-ubyte",
        "train-images.npy",
        (60_000, 28, 28),
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    IdxFile(
        "train-labels-idx1-ubyte",
        "train-labels.npy",
        (60_000,),
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    IdxFile(
        "t10k-images-idx3-ubyte",
        "test-images.npy",
        (10_000, 28, 28),
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    IdxFile(
        "t10k-labels-idx1-ubyte",
        "test-labels.npy",
        (10_000,),
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)


@dataclass(frozen=True)
class Patience:
    """How long a download may take: to the first bytes from any mirror, without a byte after that, and in all.

    Units: seconds.
    """

    first: float
    stall: float
    total: float


AUTO_PATIENCE = Patience(first=5.0, stall=10.0, total=120.0)
DOWNLOAD_PATIENCE = Patience(first=60.0, stall=30.0, total=900.0)


@dataclass(frozen=True)
class Content:
    """What one file holds, unpacked."""

    file: IdxFile
    unpacked: bytes


@dataclass(frozen=True)
class Stamp:
    """A source file as it was when it was checked: while the stamp fits, the check need not be repeated."""

    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Cache:
    """A complete cache: its folder and what its identity.json says."""

    folder: Path
    record: dict[str, Any]


class _WrongError(Exception):
    """A content is not what it should be; the text continues the sentence that begins with its name."""


class _DownloadError(Exception):
    """No mirror gave all files; the text says why, mirror by mirror."""


def prepare(
    root: str | None,
    source: Literal["auto", "files", "download", "embedded"],
    embedded_train: int = 60_000,
    embedded_test: int = 10_000,
    warn: Callable[[str], None] | None = None,
    *,
    mirrors: Sequence[str] = MIRRORS,
    patience: Patience | None = None,
) -> dict[str, Any]:
    """Make sure that a decoded cache exists, and say which data it holds.

    `root` None stands for `$DDPEXP_DATA`, else for the user's cache folder. `warn` (default: a line on stderr) hears of
    drawn digits in place of MNIST. `patience` defaults to AUTO_PATIENCE or DOWNLOAD_PATIENCE by source.

    The result is JSON-able: name, source, folder (absolute), sha256 (over the SHA-256 of the four unpacked IDX files),
    num_train, num_test, note (a phrase for people).

    Raises: RefusedError, where the data or a folder is not as it must be.
    """
    if source not in SOURCES:
        raise RefusedError(f"data.source={source} is not a source of data: set one of {', '.join(SOURCES)}")
    for key, num in (("data.embedded_train", embedded_train), ("data.embedded_test", embedded_test)):
        if not 1 <= num <= EMBEDDED_MOST:
            raise RefusedError(f"{key}={num} is no number of digits to draw: set one from 1 to {EMBEDDED_MOST}")
    if source == "embedded":
        return _embedded(embedded_train, embedded_test)
    folder = _data_folder(root)
    patience = patience or (AUTO_PATIENCE if source == "auto" else DOWNLOAD_PATIENCE)
    try:
        return _mnist(folder, source, mirrors, patience)
    except _DownloadError as error:
        if source == "download":
            raise RefusedError(
                f"MNIST could not be downloaded ({error}), so there is nothing to train on: put the four files into "
                f"data.root={folder}, or check the network, or set data.source=embedded for drawn digits"
            ) from None
        (warn or _to_stderr)(
            f"THIS IS NOT MNIST: data.root={folder} holds none of its files and they could not be downloaded "
            f"({error}), so {embedded_train:,} + {embedded_test:,} drawn digits stand in and no accuracy is comparable "
            f"with MNIST; for the real data put the four IDX files into that folder or set data.source=download, and "
            f"set data.source=embedded if drawn digits are what you want"
        )
        return _embedded(embedded_train, embedded_test)


def user_cache() -> Path:
    """Name the user's own cache folder of this program; it may not exist.

    Source: XDG Base Directory Specification; it says to ignore a relative XDG_CACHE_HOME.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):
        home = os.path.expanduser("~/.cache")
    if not os.path.isabs(home):
        raise RefusedError("the user's cache folder is unknown, as HOME is not set: set XDG_CACHE_HOME to a folder")
    return Path(home, "ddpexp")


def _data_folder(root: str | None) -> Path:
    """Name the folder of the data, absolute; it may not exist, but it is nothing else than a folder."""
    if root is None:
        variable = os.environ.get("DDPEXP_DATA", "")
        folder = Path(os.path.abspath(os.path.expanduser(variable))) if variable else user_cache()
    elif not root or "\0" in root:
        raise RefusedError(f"data.root={root!r} names no folder: set data.root to the folder with the MNIST files")
    else:
        folder = Path(os.path.abspath(os.path.expanduser(root)))
    try:
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise RefusedError(f"data.root={folder} is not a folder: set data.root to the folder with the MNIST files")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RefusedError(f"data.root={folder} cannot be used ({error.strerror}): set data.root to a folder") from None
    return folder


def _to_stderr(text: str) -> None:
    print(f"WARNING: {text}", file=sys.stderr, flush=True)


# --- MNIST: which way it comes ---


def _mnist(root: Path, source: str, mirrors: Sequence[str], patience: Patience) -> dict[str, Any]:
    """Get MNIST from the cache, the files or the network, in this order.

    Raises: _DownloadError, where none of the files is there and they could not be downloaded.
    """
    sha256 = _joint_hash([file.sha256 for file in FILES])
    name = f"mnist-{sha256[:12]}"
    bases = list(dict.fromkeys((root, user_cache())))
    caches = [cache for base in bases if (cache := _read_cache(base / _CACHES / name))]
    for cache in caches:
        if cache.record.get("root") == str(root) and _unchanged(cache.record):
            return _mnist_identity(cache, source)

    found = _find(bases if source != "files" else [root])
    missing = [file for file in FILES if file.name not in found]
    if source == "files" and missing:
        raise RefusedError(_missing_text(root, missing, "or set data.source=download to fetch what is missing"))
    if not found and caches:  # checked once, and complete: the files themselves are no longer needed
        return _mnist_identity(caches[0], source)

    loaded = {file.name: _load(path, file) for file in FILES if (path := found.get(file.name))}
    if missing:
        try:
            for content, packed in _download_unless_failed(missing, mirrors, patience, retry=source == "download"):
                stamp = _in_first(bases, functools.partial(_store, f"{content.file.name}.gz", packed))
                loaded[content.file.name] = (content, stamp)
        except _DownloadError as error:
            if not found:
                raise
            raise RefusedError(_missing_text(root, missing, f"as they could not be downloaded either ({error})")) from None
    contents = [loaded[file.name][0] for file in FILES]
    record = {
        "name": "mnist",
        "source": "download" if missing else "files",
        "sha256": sha256,
        "root": str(root),
        "stamps": [vars(loaded[file.name][1]) for file in FILES],
    }
    if caches:
        return _mnist_identity(_update_cache(caches[0], record), source)
    return _mnist_identity(_in_first(bases, lambda base: _write_cache(base, name, contents, record)), source)


def _missing_text(root: Path, missing: Sequence[IdxFile], end: str) -> str:
    names = ", ".join(file.name for file in missing)
    have = f"{len(FILES) - len(missing)} of the four MNIST files"
    return (
        f"data.root={root} holds {have} (also looked in MNIST/raw and raw), and training needs all four: add {names} "
        f"there, each with or without .gz, {end}"
    )


def _mnist_identity(cache: Cache, source: str) -> dict[str, Any]:
    origin = "files" if source == "files" else cache.record["source"]
    folders = ", ".join(dict.fromkeys(os.path.dirname(stamp["path"]) for stamp in cache.record["stamps"]))
    way = "from files in" if origin == "files" else "downloaded to"
    return _identity(cache, origin, f"{way} {folders}", "MNIST")


def _identity(cache: Cache, source: str, way: str, title: str) -> dict[str, Any]:
    record = cache.record
    return {
        "name": record["name"],
        "source": source,
        "folder": str(cache.folder),
        "sha256": record["sha256"],
        "num_train": record["num_train"],
        "num_test": record["num_test"],
        "note": f"{title}, {record['num_train']:,} + {record['num_test']:,} images, {way}",
    }


def _joint_hash(hashes: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


# --- Drawn digits ---


def _embedded(num_train: int, num_test: int) -> dict[str, Any]:
    """Get the drawn digits from the cache, or draw them."""
    name = f"embedded-v{EMBEDDED_VERSION}-{num_train}-{num_test}"
    base = user_cache()
    cache = _read_cache(base / _CACHES / name)
    if cache is None:
        contents = _draw((num_train, num_test))
        record = {
            "name": "embedded-digits",
            "sha256": _joint_hash([content.file.sha256 for content in contents]),
        }
        cache = _in_first([base], lambda base: _write_cache(base, name, contents, record))
    return _identity(cache, "embedded", "embedded in ddpexp", "drawn digits (NOT MNIST)")


def _draw(nums: tuple[int, int]) -> list[Content]:
    """Draw both parts, as the contents of IDX files, so that they are hashed and cached just as MNIST is."""
    from ddpexp.data import digits  # it needs numpy, which the command must not pay for otherwise

    contents = []
    for num, seed, (images_file, labels_file) in zip(nums, EMBEDDED_SEEDS, (FILES[:2], FILES[2:]), strict=True):
        images, labels = digits.draw(num, seed)
        for file, array in ((images_file, images), (labels_file, labels)):
            shaped = replace(file, shape=array.shape)
            unpacked = shaped.header + array.tobytes()
            contents.append(Content(replace(shaped, sha256=hashlib.sha256(unpacked).hexdigest()), unpacked))
    return contents


# --- Files: find them, unpack them, check them ---


def _find(bases: Sequence[Path]) -> dict[str, Path]:
    """Find the files by any of their usual names, in the folders and where torchvision keeps them below."""
    found: dict[str, Path] = {}
    folders = [folder for base in bases for folder in (base, base / "MNIST" / "raw", base / "raw")]
    for file in FILES:
        names = [f"{name}{end}" for name in (file.name, file.name.replace("-idx", ".idx")) for end in ("", ".gz")]
        for path in (folder / name for folder in folders for name in names):
            try:
                status = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise RefusedError(f"{path} cannot be looked at ({error.strerror}): give access or move it") from None
            if not stat.S_ISREG(status.st_mode):
                raise RefusedError(f"{path} is not a regular file, though it has the name of one: move it away")
            found[file.name] = path
            break
    return found


def _load(path: Path, file: IdxFile) -> tuple[Content, Stamp]:
    """Read one file, whole and checked."""
    try:
        with open(path, "rb") as stream:
            stamp = _stamp(str(path), os.fstat(stream.fileno()))
            return Content(file, _unpack(stream, file)), stamp
    except _WrongError as error:
        raise RefusedError(
            f"{path} {error}, and training on it would not be training on MNIST: replace it by the true {file.name}, "
            f"or delete it and set data.source=download"
        ) from None
    except OSError as error:
        raise RefusedError(f"{path} cannot be read ({error.strerror}): make it readable or replace it") from None


def _unpack(stream: BinaryIO, file: IdxFile) -> bytes:
    """Read the unpacked content, never more than one chunk beyond the right size, and check it.

    Whether it is packed shows in its first bytes; the name may lie, as some browsers unpack what they save.

    Raises: _WrongError.
    """
    start = stream.read(256)
    stream.seek(0)
    if not start:
        raise _WrongError("is empty")
    if _is_web_page(start):
        raise _WrongError(f"is a web page (it begins with {start[:20]!r}), not data")
    packed = start.startswith(b"\x1f\x8b")
    reader: BinaryIO = gzip.GzipFile(fileobj=stream) if packed else stream  # type: ignore[assignment]
    content = bytearray()
    try:
        while len(content) <= file.size and (chunk := reader.read(16 * _CHUNK)):
            content += chunk
    except EOFError:
        raise _WrongError(f"is cut off: its gzip data ends before the {file.size:,} bytes it must unpack to") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _WrongError(f"is damaged: its gzip data cannot be unpacked ({error})") from None
    magic = file.header[:4]
    if len(content) >= 4 and content[:4] != magic:
        raise _WrongError(f"begins with the magic number {int.from_bytes(content[:4], 'big')}, not {int.from_bytes(magic, 'big')}")
    unpacked = " once unpacked" if packed else ""
    if len(content) != file.size:
        found = f"more than {file.size:,}" if len(content) > file.size else f"{len(content):,}"
        raise _WrongError(f"has {found} bytes{unpacked}, not {file.size:,}")
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != file.sha256:
        raise _WrongError(f"has the right size but the SHA-256 {sha256}{unpacked}, not {file.sha256}")
    return bytes(content)


def _is_web_page(start: bytes) -> bool:
    return start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<")


def _stamp(path: str, status: os.stat_result) -> Stamp:
    return Stamp(path, status.st_size, status.st_mtime_ns)


def _unchanged(record: dict[str, Any]) -> bool:
    """Say whether every source file is still as it was when it was checked."""
    try:
        return all(vars(_stamp(stamp["path"], os.stat(stamp["path"]))) == stamp for stamp in record["stamps"])
    except (OSError, KeyError, TypeError):
        return False


# --- The network ---


def _download_unless_failed(
    files: Sequence[IdxFile], mirrors: Sequence[str], patience: Patience, retry: bool
) -> list[tuple[Content, bytes]]:
    """Download the files, each unpacked and as received; without `retry` a recent failure stands."""
    note = user_cache() / _CACHES / _FAILURE
    if not retry:
        with contextlib.suppress(OSError):
            if 0 <= time.time() - note.stat().st_mtime < _RETRY_AFTER:
                raise _DownloadError(f"tried less than {_RETRY_AFTER / 60:.0f} minutes ago: {note.read_text()[:1000]}")
    try:
        received = _download(files, mirrors, patience)
    except _DownloadError as error:
        text = str(error)
        with contextlib.suppress(OSError):  # without the note the next start tries again, no more
            _put(user_cache(), note, text.encode())
        raise
    with contextlib.suppress(OSError):
        note.unlink()
    return received


def _download(files: Sequence[IdxFile], mirrors: Sequence[str], patience: Patience) -> list[tuple[Content, bytes]]:
    """Fetch the files from the first mirror that gives them, leaving a mirror at its first wrong answer."""
    usable = list(mirrors)
    problems: list[str] = []
    begin = time.monotonic()
    heard = False
    received = []
    for file in files:
        while True:
            left = patience.total - (time.monotonic() - begin)
            wait = max(0.0, min(left, patience.stall if heard else patience.first))
            answer = _first_answer(usable, file, wait, patience.stall, problems)
            heard = True
            try:
                packed = _receive(answer, file, begin + patience.total)
                received.append((Content(file, _unpack(io.BytesIO(packed), file)), packed))
                break
            except _WrongError as error:
                problems.append(f"{answer.mirror}: {file.name}.gz {error}")
                usable.remove(answer.mirror)
    return received


@dataclass(frozen=True)
class Answer:
    """A mirror's answer whose first bytes have come."""

    mirror: str
    response: HTTPResponse
    start: bytes


def _first_answer(mirrors: list[str], file: IdxFile, wait: float, stall: float, problems: list[str]) -> Answer:
    """Ask the mirrors for a file, the next one when the last has failed or kept silent for its share of the time.

    Each is asked in a thread of its own, as nothing else bounds the time of a name look-up; a thread that hangs is left
    behind and ends with the process. A mirror that fails is removed from `mirrors`, with its reason in `problems`.

    Raises: _DownloadError.
    """
    answers: queue.SimpleQueue[Answer | tuple[str, str]] = queue.SimpleQueue()
    over = threading.Event()
    begin = time.monotonic()
    waiting = list(mirrors)
    share = wait / max(1, len(waiting))
    asked = 0
    open_questions = 0
    try:
        while mirrors:
            elapsed = time.monotonic() - begin
            if elapsed >= wait:
                problems.append(f"no answer from {', '.join(mirrors)} within {wait:.0f} seconds")
                break
            if waiting and (open_questions == 0 or elapsed >= asked * share):
                arguments = (waiting.pop(0), file, stall, answers, over)
                threading.Thread(target=_ask, args=arguments, name="mnist-mirror", daemon=True).start()
                asked += 1
                open_questions += 1
            pause = (min(wait, asked * share) if waiting else wait) - elapsed
            try:
                answer = answers.get(timeout=max(pause, 0.0))
            except queue.Empty:
                continue
            if isinstance(answer, Answer):
                return answer
            open_questions -= 1
            mirror, problem = answer
            mirrors.remove(mirror)
            problems.append(f"{mirror}: {problem}")
    finally:
        over.set()
    raise _DownloadError(" ".join("; ".join(problems).split()))


def _ask(
    mirror: str,
    file: IdxFile,
    stall: float,
    answers: queue.SimpleQueue[Answer | tuple[str, str]],
    over: threading.Event,
) -> None:
    """Ask one mirror for a file, and report its first bytes or its failure."""
    from http.client import HTTPException
    from urllib.request import Request, urlopen  # late: these two take longer to import than all the rest

    url = f"{mirror.rstrip('/')}/{file.name}.gz"
    try:
        response = urlopen(Request(url, headers={"User-Agent": "ddpexp"}), timeout=stall)
        start = response.read1(_CHUNK)
    except (OSError, HTTPException, ValueError) as error:
        answers.put((mirror, f"{file.name}.gz: {error}"))
        return
    if over.is_set():
        response.close()
    elif not start or _is_web_page(start):
        response.close()
        answers.put((mirror, f"{file.name}.gz is {'a web page' if start else 'empty'}, not data"))
    else:
        answers.put(Answer(mirror, response, start))


def _receive(answer: Answer, file: IdxFile, end: float) -> bytes:
    """Read the rest of an answer, no more than an unpacked file's size, as packing does not make it larger.

    Raises: _WrongError.
    """
    from http.client import HTTPException

    content = bytearray(answer.start)
    with answer.response:
        try:
            while chunk := answer.response.read1(_CHUNK):
                content += chunk
                if len(content) > file.size:
                    raise _WrongError(f"goes on after {file.size:,} bytes")
                if time.monotonic() > end:
                    raise _WrongError(f"came too slowly: {len(content):,} bytes when time was up")
        except TimeoutError:
            raise _WrongError(f"stopped coming after {len(content):,} bytes") from None
        except (OSError, HTTPException) as error:
            raise _WrongError(f"broke off after {len(content):,} bytes ({error})") from None
    return bytes(content)


# --- The cache: complete or not there ---


def _read_cache(folder: Path) -> Cache | None:
    """Read what a cache says of itself; None where it is not complete. Costs one small file and six stats."""
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return None
        record = json.loads((folder / _IDENTITY).read_bytes())
        if record["format"] != _FORMAT or any(
            os.lstat(folder / file.cached).st_size != record["sizes"][file.cached] for file in FILES
        ):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Cache(folder, record)


def _write_cache(base: Path, name: str, contents: Sequence[Content], facts: dict[str, Any]) -> Cache:
    """Write a cache beside its place and move it in, so that it is never there in part.

    Raises: OSError.
    """
    folder = base / _CACHES / name
    sizes = {}
    with _temp_folder(base) as temp:
        whole = temp / name
        whole.mkdir()
        # As open to readers as its base: a shared data folder shares its cache, the user's own is private.
        os.chmod(whole, os.stat(base).st_mode & 0o755 | 0o700)
        for content in contents:
            file = content.file
            header = _npy_header(file.shape)
            _write(whole / file.cached, header, memoryview(content.unpacked)[len(file.header) :])
            sizes[file.cached] = len(header) + math.prod(file.shape)
        train, test = contents[0].file.shape[0], contents[2].file.shape[0]
        record = facts | {"format": _FORMAT, "num_train": train, "num_test": test, "sizes": sizes}
        _write(whole / _IDENTITY, json.dumps(record, indent=1).encode())
        _sync(whole)
        _move_in(whole, folder, temp)
    _sync(folder.parent)
    return Cache(folder, record)


def _move_in(whole: Path, folder: Path, temp: Path) -> None:
    """Move a finished cache to its place, unless another process has just done so.

    Whatever else is in the place (a damaged cache, a link) is moved away as it is, and goes with the temporary folder.
    """
    for attempt in range(10):
        try:
            os.rename(whole, folder)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        if _read_cache(folder):
            return
        with contextlib.suppress(FileNotFoundError):  # another process has moved it away
            os.rename(folder, temp / f"old-{attempt}")
    raise OSError(errno.EBUSY, "other processes keep putting damaged caches there", str(folder))


def _update_cache(cache: Cache, facts: dict[str, Any]) -> Cache:
    """Note other sources of the same content; where that cannot be written, the next start checks them again."""
    record = cache.record | facts
    with contextlib.suppress(OSError):
        _put(cache.folder.parent.parent, cache.folder / _IDENTITY, json.dumps(record, indent=1).encode())
    return Cache(cache.folder, record)


def _store(name: str, content: bytes, base: Path) -> Stamp:
    """Keep a downloaded file.

    Raises: OSError.
    """
    target = base / name
    _put(base, target, content)
    return _stamp(str(target), os.stat(target))


def _put(base: Path, target: Path, content: bytes) -> None:
    """Write a file below `base` whole or not at all; a link in its place is replaced, not followed."""
    with _temp_folder(base) as temp:
        _write(temp / "new", content)
        os.replace(temp / "new", target)
    _sync(target.parent)


@contextlib.contextmanager
def _temp_folder(base: Path) -> Iterator[Path]:
    """Make a folder that is gone afterwards, on the disk of `base`, and clear those that killed processes have left."""
    os.makedirs(base, mode=0o700 if base == user_cache() else 0o777, exist_ok=True)
    caches = base / _CACHES
    with contextlib.suppress(FileExistsError):
        os.mkdir(caches)
    if not stat.S_ISDIR(os.lstat(caches).st_mode):
        raise RefusedError(f"{caches} is a link or a file, and writing there could change something else: remove it")
    for entry in os.scandir(caches):
        with contextlib.suppress(OSError):
            if entry.name.startswith(_TEMP) and time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE_AFTER:
                _remove(Path(entry.path))
    temp = Path(tempfile.mkdtemp(prefix=_TEMP, dir=caches))
    try:
        yield temp
    finally:
        _remove(temp)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _in_first(bases: Sequence[Path], act: Callable[[Path], T]) -> T:
    """Do the writing at the first base that lets it."""
    problems = []
    for base in bases:
        try:
            return act(base)
        except OSError as error:
            problems.append(f"{base}: {error.strerror or error}")
    raise RefusedError(
        f"the data could not be written ({'; '.join(problems)}), and training reads it from there: free about 70 MB, "
        f"or set XDG_CACHE_HOME to a folder that can be written"
    )


def _write(path: Path, *parts: bytes | memoryview) -> None:
    with open(path, "xb") as stream:
        stream.writelines(parts)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(folder: Path) -> None:
    """Make the names in a folder outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _npy_header(shape: tuple[int, ...]) -> bytes:
    """Make the header of an `.npy` file of bytes in C order.

    Source: NumPy Enhancement Proposal 1, format version 1.0; data begins at a multiple of 64.
    """
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape!r}, }}"
    length = -(10 + len(text) + 1) % 64 + len(text) + 1
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", length) + text.ljust(length - 1).encode() + b"\n"
