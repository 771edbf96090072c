"""Shards that lie elsewhere (https, s3, ...), read through fsspec in parts that a bounded cache on this machine keeps.

Free of torch; fsspec is imported where a remote shard is named.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import io
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ddpexp.data.hashes import chunks_of, hash_of, is_reading_again, mark_of, report_right
from ddpexp.data.user_cache import user_cache
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.system.limits import reason_with_limit
from ddpexp.system.terminal import print_message

PART = 1 << 23  # bytes that are fetched and kept at once
_WAITS = (0.5, 1.0, 2.0, 4.0)  # seconds before another try
_LOCKS = 64  # files, of which each part has one
_CONNECTIONS = 16
_USED_AGAIN = 60.0  # seconds after which a read marks a part as used
_ABANDONED = 3600.0  # seconds after which a part that is being written belongs to nobody
_VERSION_KEYS = ("ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "created")  # of file systems


@dataclass(frozen=True)
class RemoteShard:
    """A shard by its address; `version` names these bytes of it, and `limit` is what the whole cache may hold."""

    url: str
    size: int
    version: str
    limit: int

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes at `offset`, fewer at the end of the shard.

        Ranks: any, also at the same time: of those that want a part, one fetches it.

        Raises:
            DdpexpError: the server does not answer, after several tries, or the cache cannot be written.
        """
        end = min(offset + size, self.size)
        pieces = []
        for number in range(offset // PART, -(-end // PART)):
            first = number * PART
            begin, stop = max(offset, first), min(end, first + PART)
            pieces.append(self._part(number, begin - first, stop - begin))
        return b"".join(pieces)

    def _part(self, number: int, offset: int, size: int) -> bytes:
        path = folder() / f"{self.version}-{number}"
        found = self._kept(path, number, offset, size)
        if found is None:
            with _lock(path.name):
                found = self._kept(path, number, offset, size)  # another process may have fetched it meanwhile
                if found is None:
                    data = self._fetch(number)
                    found = data[offset : offset + size]
        return found

    def _kept(self, path: Path, number: int, offset: int, size: int) -> bytes | None:
        """Read from the cache. A part that is removed meanwhile stays readable until it is closed."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(descriptor)
            if status.st_size != self._length(number) or not _is_right(path, *_stamp(status)):
                return None
            _mark_used(path.name)
            return os.pread(descriptor, size, offset)
        finally:
            os.close(descriptor)

    def _length(self, number: int) -> int:
        return min(PART, self.size - number * PART)

    def verify(self) -> None:
        """Read all parts that the cache has of this shard again, and remove damaged ones."""
        num_bytes = 0
        for number in range(-(-self.size // PART)):
            path = folder() / f"{self.version}-{number}"
            with contextlib.suppress(FileNotFoundError):
                if _check(path, size := os.stat(path).st_size):
                    num_bytes += size
                else:
                    os.unlink(path)
        report_right(folder(), num_bytes)

    def _fetch(self, number: int) -> bytes:
        first, stop = number * PART, min((number + 1) * PART, self.size)
        data = self._download(first, stop)
        if len(data) == self.size:  # all of it: what a server without ranges sends
            for other in range(-(-self.size // PART)):
                keep(f"{self.version}-{other}", data[other * PART : (other + 1) * PART], self.limit)
            return data[first:stop]
        keep(f"{self.version}-{number}", data, self.limit)
        return data

    def _download(self, first: int, stop: int) -> bytes:
        problem = ""
        for wait in (*_WAITS, None):
            try:
                system, path = _system(self.url)
                data: bytes = system.cat_file(path, start=first, end=stop)
                if len(data) in (stop - first, self.size):
                    return data
                problem = f"{len(data):,} of {stop - first:,} bytes arrived"
            except Exception as error:  # fsspec's file systems raise errors of their own libraries
                if _is_missing(error):
                    raise DdpexpError(
                        "no longer exists, but the index refers to its samples",
                        suggestion="Restore it, and start the same command again.",
                        place=self.url,
                    ) from None
                problem = _text(error)
            if wait is not None:
                time.sleep(wait)
        raise DdpexpError(
            f"cannot be read at byte {first:,} after {len(_WAITS) + 1} tries ({problem}), so this step has no samples",
            suggestion="When the server answers again, the same command resumes the run.",
            place=self.url,
        )


class RemoteFile(io.RawIOBase):
    """A remote shard as a file that tarfile reads."""

    def __init__(self, shard: RemoteShard) -> None:
        """Begin at the first byte."""
        self.shard, self.place = shard, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self.place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, as that of any file."""
        self.place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.shard.size}[whence]
        return self.place

    def readinto(self, buffer: Any) -> int:
        """Read into `buffer`; 0 at the end."""
        data = self.shard.read(self.place, len(buffer)) if self.place < self.shard.size else b""
        buffer[: len(data)] = data
        self.place += len(data)
        return len(data)


def is_remote(pattern: str) -> bool:
    """Whether a pattern names files by an address, such as https://... or s3://..."""
    return "://" in pattern


def find(key: str, urls: list[str], limit: int) -> list[RemoteShard]:
    """Return the shards that addresses or patterns name, sorted.

    Raises:
        RefusedError: fsspec is missing or has no such protocol, or the server does not answer or lacks a file.
    """
    if importlib.util.find_spec("fsspec") is None:
        raise RefusedError(
            "needs fsspec", key=key, value=urls[0], suggestion="Install it: pip install 'ddpexp[remote]'."
        )
    found: list[RemoteShard] = []
    for url in urls:
        try:
            system, path = _system(url)
            paths = system.glob(path) if any(sign in url for sign in "*[") else [path]
            with ThreadPoolExecutor(_CONNECTIONS) as pool:
                infos = list(pool.map(lambda one, system=system: _info(system, one), paths))
        except ImportError as error:  # aiohttp, s3fs, ...
            raise RefusedError(
                f"needs another package: {_text(error)}",
                key=key,
                value=url,
                suggestion="Install it: pip install 'ddpexp[remote]' for http and https, s3fs for s3, gcsfs for gs.",
            ) from None
        except Exception as error:
            if _is_missing(error):
                raise RefusedError("The server has no such file", key=key, value=url) from None
            raise RefusedError(
                f"cannot be read: {_text(error)}", key=key, value=url, suggestion="Check the address and the network."
            ) from None
        for one, info in zip(paths, infos, strict=True):
            address = system.unstrip_protocol(one)
            if not info.get("size"):
                raise RefusedError(
                    f"The server does not report the size of {address}",
                    key=key,
                    suggestion="Download the file, and name the copy.",
                )
            marks = [address, info["size"], *(str(info.get(name)) for name in _VERSION_KEYS)]
            version = hashlib.sha256("\n".join(map(str, marks)).encode()).hexdigest()[:24]
            found.append(RemoteShard(address, info["size"], version, limit))
    return sorted(found, key=lambda shard: shard.url)


def folder() -> Path:
    """Return the folder of the parts; it may not exist."""
    return user_cache() / "shards"


def _sum(name: str) -> Path:
    """Return the file with the hash of a part and the mark of when it was found right; its time is the last use."""
    return folder() / "sums" / name


def _mark_used(name: str) -> None:
    """Take note that a part is in use."""
    with contextlib.suppress(OSError):
        if time.time() - os.stat(_sum(name)).st_mtime > _USED_AGAIN:
            os.utime(_sum(name))


def _stamp(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _is_right(path: Path, inode: int, size: int, modified: int, changed: int) -> bool:
    try:
        _check_once(path, inode, size, modified, changed)
    except _DamagedPartError:
        return False
    return True


class _DamagedPartError(Exception):
    """A part is not as it was received."""


@lru_cache(maxsize=1 << 14)  # a part is asked for with every sample; one that is not right yet is looked at again
def _check_once(path: Path, inode: int, size: int, modified: int, changed: int) -> None:
    if not _check(path, size):
        raise _DamagedPartError


def _check(path: Path, size: int) -> bool:
    """Return whether a part is as it was received; once it is, it is read again only after a change or a reboot."""
    try:
        digest, _, mark = _sum(path.name).read_text().partition("\n")
        now = mark_of(path.parent, {path.name: size}, {path.name: [(size, digest)]})
        if mark == now and not is_reading_again():
            return True
        is_right = chunks_of(path.parent, {path.name: size}) == {path.name: [(size, digest)]}
    except (OSError, ValueError):
        return False
    if is_right:
        with contextlib.suppress(OSError):
            _write_sum(path.name, digest, now)
    else:
        print_message(f"WARNING: {path} is damaged, so it is not used, and this part of the shard is fetched again")
    return is_right


def _write_sum(name: str, digest: str, mark: str) -> None:
    temp = _sum(f".{name}-{os.getpid()}")
    os.makedirs(temp.parent, mode=0o700, exist_ok=True)
    temp.write_text(f"{digest}\n{mark}")
    os.replace(temp, _sum(name))


def keep(name: str, data: bytes, limit: int) -> None:
    """Write a part, and remove those that were not used for longest beyond `limit` bytes, but not this one.

    Raises:
        DdpexpError: it cannot be written.
    """
    place = folder()
    temp = place / f".{name}-{os.getpid()}"
    try:
        _make_room(place, limit - len(data))
        temp.write_bytes(data)
        digest = hash_of(data)
        _write_sum(name, digest, "")
        os.replace(temp, place / name)
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            _write_sum(name, digest, mark_of(place, {name: len(data)}, {name: [(len(data), digest)]}))
    except OSError as error:
        with contextlib.suppress(OSError):
            temp.unlink()
        raise DdpexpError(
            f"cannot hold the parts of remote shards ({reason_with_limit(error, place)})",
            suggestion="Free space, use less data.cache_gb, or set XDG_CACHE_HOME to another folder; the "
            "same command resumes the run.",
            place=place,
        ) from None


def _make_room(place: Path, limit: int) -> None:
    parts, abandoned = [], time.time_ns() - int(_ABANDONED * 1e9)
    for entry in os.scandir(place):
        with contextlib.suppress(FileNotFoundError):
            if entry.is_file(follow_symlinks=False):
                stat = entry.stat(follow_symlinks=False)
                used = stat.st_mtime_ns
                with contextlib.suppress(FileNotFoundError):
                    used = os.stat(_sum(entry.name)).st_mtime_ns
                parts.append((used, stat.st_size, entry.path))
    total = sum(size for _, size, _ in parts)
    for modified, size, path in sorted(parts):
        if total <= limit:
            return
        if os.path.basename(path).startswith(".") and modified > abandoned:  # another process writes it
            continue
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            _sum(os.path.basename(path)).unlink(missing_ok=True)
        total -= size


@contextlib.contextmanager
def _lock(name: str) -> Iterator[None]:
    """Let one process at a time fetch a part; the kernel releases the lock when a process ends, however it ends."""
    locks = folder() / "locks"
    try:
        os.makedirs(locks, mode=0o700, exist_ok=True)
        number = int(hashlib.sha256(name.encode()).hexdigest(), 16) % _LOCKS
        descriptor = os.open(locks / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DdpexpError(
            f"cannot be written ({error.strerror})", suggestion="Set XDG_CACHE_HOME to a folder.", place=locks
        ) from None
    try:
        with contextlib.suppress(OSError):  # a file system without such locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _system(url: str) -> tuple[Any, str]:
    found: tuple[Any, str] = importlib.import_module("fsspec.core").url_to_fs(url)  # one instance a process
    return found


def _info(system: Any, path: str) -> Mapping[str, Any]:
    for wait in (*_WAITS[:2], None):
        try:
            info: Mapping[str, Any] = system.info(path)
            return info
        except Exception as error:
            if wait is None or _is_missing(error):
                raise
            time.sleep(wait)
    raise AssertionError(path)


def _is_missing(error: Exception) -> bool:
    """Whether a server has said that there is no such file; fsspec raises the same where nobody answers over HTTP."""
    cause = error.__cause__
    status = getattr(cause, "status", None)
    unreachable = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
    return isinstance(error, FileNotFoundError) and not unreachable and status in (None, 404, 410)


def _text(error: Exception) -> str:
    error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
