"""An atomic cache folder of memory-mappable `.npy` files: complete or absent, whatever process dies."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ddpexp.data.mnist import idx
from ddpexp.errors import RefusedError
from ddpexp.system.limits import reason_with_limit

T = TypeVar("T")

CACHES = ".ddpexp-cache"  # the folder of all caches, in the data folder and in the user's cache folder

_FORMAT = 1  # of identity.json
_IDENTITY = "identity.json"
_TEMP = ".tmp-"
_POLL_SECONDS = 0.05
_STALE_AFTER = 3600.0  # seconds: no running process keeps a temporary folder that long


@dataclass(frozen=True)
class Cache:
    """A complete cache: its folder and the contents of identity.json."""

    folder: Path
    record: dict[str, Any]


def user_cache() -> Path:
    """Return ddpexp's cache folder of this user; it may not exist.

    Source: XDG Base Directory Specification; it says to ignore a relative XDG_CACHE_HOME.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):
        home = os.path.expanduser("~/.cache")
    if not os.path.isabs(home):
        raise RefusedError("the user's cache folder is unknown, as HOME is not set: set XDG_CACHE_HOME to a folder")
    return Path(home, "ddpexp")


def read_cache(folder: Path) -> Cache | None:
    """Open a cache; None if it is not complete. Reads one small file and the sizes of the others."""
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return None
        record = json.loads((folder / _IDENTITY).read_bytes())
        if record["format"] != _FORMAT or any(
            os.lstat(folder / file.cached).st_size != record["sizes"][file.cached] for file in idx.FILES
        ):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Cache(folder, record)


def write_cache(base: Path, name: str, contents: Sequence[idx.Content], facts: dict[str, Any]) -> Cache:
    """Write a cache to a temporary folder and rename it, so that it is never incomplete.

    Raises: OSError.
    """
    folder = base / CACHES / name
    sizes = {}
    with _temp_folder(base) as temp:
        whole = temp / name
        whole.mkdir()
        # With the permissions of its base: the cache in a shared data folder is shared, the user's own is private.
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


def update_cache(cache: Cache, facts: dict[str, Any]) -> Cache:
    """Record other sources of the same content; if that fails, the next start checks them again."""
    record = cache.record | facts
    with contextlib.suppress(OSError):
        put(cache.folder.parent.parent, cache.folder / _IDENTITY, json.dumps(record, indent=1).encode())
    return Cache(cache.folder, record)


def in_first(bases: Sequence[Path], act: Callable[[Path], T]) -> T:
    """Call `act` with the first base that can be written."""
    problems = []
    for base in bases:
        try:
            return act(base)
        except OSError as error:
            problems.append(f"{base}: {reason_with_limit(error, base)}")
    raise RefusedError(
        f"the data could not be written ({'; '.join(problems)}), and training reads it from there: free about 70 MB, "
        "or set XDG_CACHE_HOME to a folder that can be written"
    )


@contextlib.contextmanager
def alone(seconds: float) -> Iterator[None]:
    """Let one command of this user at a time run the block; others wait for it, at most `seconds`.

    The kernel's lock on the folder is released when the process ends, however it ends, and leaves no file.
    """
    import fcntl  # late, as tempfile

    folder = user_cache() / CACHES
    try:
        os.makedirs(folder.parent, mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # the block reports why, if it has to write there
        yield
        return
    try:
        deadline = time.monotonic() + seconds
        reported = False
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not reported:
                    print(
                        "ddpexp: waiting for another command, which is downloading the data",
                        file=sys.stderr,
                        flush=True,
                    )
                reported = True
                time.sleep(_POLL_SECONDS)
            except OSError:  # a file system without such locks
                break
        yield
    finally:
        os.close(descriptor)


def put(base: Path, target: Path, content: bytes) -> None:
    """Write a file below `base` atomically; a link in its place is replaced, not followed."""
    with _temp_folder(base) as temp:
        _write(temp / "new", content)
        os.replace(temp / "new", target)
    _sync(target.parent)


def _move_in(whole: Path, folder: Path, temp: Path) -> None:
    """Rename a finished cache to its final name, unless another process has just done so.

    Anything else with that name (a damaged cache, a link) is moved to the temporary folder, and removed with it.
    """
    for attempt in range(10):
        try:
            os.rename(whole, folder)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        if read_cache(folder):
            return
        with contextlib.suppress(FileNotFoundError):  # another process has moved it away
            os.rename(folder, temp / f"old-{attempt}")
    raise OSError(errno.EBUSY, "other processes keep putting damaged caches there", str(folder))


@contextlib.contextmanager
def _temp_folder(base: Path) -> Iterator[Path]:
    """Yield a temporary folder on the file system of `base`, and remove old ones of killed processes."""
    import tempfile  # late: most starts find a cache and write nothing

    os.makedirs(base, mode=0o700 if base == user_cache() else 0o777, exist_ok=True)
    caches = base / CACHES
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
    import shutil  # late, as tempfile

    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _write(path: Path, *parts: bytes | memoryview) -> None:
    with open(path, "xb") as stream:
        stream.writelines(parts)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(folder: Path) -> None:
    """Flush a folder, so that new names in it survive a power failure."""
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
