"""Hashes of the chunks of files, and which files were found right since this machine was started.

Fast to import: the launching command imports this module.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from ddpexp.data.user_cache import user_cache
from ddpexp.errors import RefusedError
from ddpexp.system.network import boot_id
from ddpexp.system.terminal import print_message
from ddpexp.system.text import size_text

CHUNK = 1 << 24  # bytes that have a hash together
_BLOCK = 1 << 20  # bytes that are read at once: they stay in the processor's cache until they are hashed
_IN_THREADS = 1 << 26  # bytes from which several threads read and hash
_ANNOUNCED = 1 << 31  # bytes that take seconds to read
_MOST_THREADS = 8  # more do not make a disk faster
_FORGOTTEN_AFTER = 90 * 24 * 3600.0  # seconds
_SWEPT, _SWEPT_EVERY = "swept", 24 * 3600.0  # a file whose time says when old notes were removed; seconds

Sizes = Mapping[str, int]  # of files, by their paths in a folder
Chunk = tuple[int, str]  # where it ends in its file, and its hash
Chunks = Mapping[str, Sequence[Chunk]]  # of each file, in their order

_read_again: list[tuple[Path, int]] | None = None  # see `reading_again`


@contextlib.contextmanager
def reading_again(condition: bool = True) -> Iterator[list[tuple[Path, int]]]:
    """Read files again in the block that were found right before; yield the folders and bytes that are right."""
    global _read_again
    verified: list[tuple[Path, int]] = []
    before = _read_again
    if condition:
        _read_again = verified
        _damage.cache_clear()
    try:
        yield verified
    finally:
        _read_again = before


def is_reading_again() -> bool:
    """Return whether this is within `reading_again`."""
    return _read_again is not None


def report_right(folder: Path, num_bytes: int) -> None:
    """Add to what `reading_again` yields."""
    if _read_again is not None:
        _read_again.append((folder, num_bytes))


def hash_of(content: bytes | bytearray | memoryview) -> str:
    """Return the XXH3 hash of a content, 128 bits in hexadecimal; it finds damage, and does not stop an attacker."""
    return xxhash.xxh3_128_hexdigest(content)


def hash_of_json(value: Any) -> str:
    """Return a hash of a JSON value; the order of keys does not matter."""
    return hash_of(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def chunks_of(folder: Path, sizes: Sizes) -> dict[str, list[Chunk]]:
    """Return the chunks of files of these sizes with their hashes. Raises: OSError."""
    return _hashed(folder, {name: [*range(CHUNK, size, CHUNK), size] if size else [] for name, size in sizes.items()})


def hash_of_range(path: Path, begin: int, end: int) -> str:
    """Return the hash of the bytes from `begin` to below `end` of a file. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        digest = xxhash.xxh3_128()
        while begin < end and (block := os.pread(descriptor, min(_BLOCK, end - begin), begin)):
            digest.update(block)
            begin += len(block)
        return digest.hexdigest()
    finally:
        os.close(descriptor)


def damage_of(folder: Path, sizes: Sizes, chunks: Chunks) -> str | None:
    """Return what is wrong with the first file that is not as it was hashed; None if all are right.

    Files that were found right are not read again until one of them changes or the machine is started anew.
    """
    try:
        stamps = _stamps(folder, sizes)
    except OSError as error:
        return f"{error.filename or folder} {_because(error)}"
    return _damage(folder, json.dumps([sizes, chunks]), _mark(folder, chunks, stamps))


def mark_of(folder: Path, sizes: Sizes, chunks: Chunks) -> str:
    """Return a text that stands for these very files, unchanged since this machine was started. Raises: OSError."""
    return _mark(folder, chunks, _stamps(folder, sizes))


def remember(folder: Path, sizes: Sizes, chunks: Chunks) -> None:
    """Take note that files are right, because they have just been written."""
    with contextlib.suppress(OSError):
        _write_note(mark_of(folder, sizes, chunks))
    report_right(folder, sum(sizes.values()))


@cache  # a process asks for the same files several times, and notes cannot be written everywhere
def _damage(folder: Path, listing: str, note: str) -> str | None:
    if _read_again is None and _has_note(note):
        return None
    sizes, chunks = json.loads(listing)
    if (total := sum(sizes.values())) >= _ANNOUNCED:
        print_message(f"ddpexp: verifying {folder} ({size_text(total)}), as after every start of this machine")
    ends = {name: [end for end, _ in chunks[name]] for name in sizes}
    try:
        found = _hashed(folder, ends)
    except OSError as error:
        return f"{error.filename or folder} {_because(error)}"
    for name, size in sizes.items():
        begin = 0
        for (end, digest), (_, expected) in zip(found[name], chunks[name], strict=True):
            if digest != expected:
                return f"{folder / name} is damaged between byte {begin:,} and byte {end:,}"
            begin = end
        assert begin == size, "the record has a hash of its own"
    _write_note(note)
    report_right(folder, total)
    return None


def _hashed(folder: Path, ends: Mapping[str, Sequence[int]]) -> dict[str, list[Chunk]]:
    """Return chunks with their hashes, by where they end in their files. Raises: OSError."""
    tasks = [
        (folder / name, begin, end)
        for name, of_file in ends.items()
        for begin, end in zip([0, *of_file], of_file)  # noqa: B905
    ]
    if sum(end - begin for _, begin, end in tasks) < _IN_THREADS:
        digests = iter([hash_of_range(*task) for task in tasks])
    else:
        from concurrent.futures import ThreadPoolExecutor  # late: few caches are so large

        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
            digests = iter(list(threads.map(lambda task: hash_of_range(*task), tasks)))
    return {name: [(end, next(digests)) for end in of_file] for name, of_file in ends.items()}


def _stamps(folder: Path, sizes: Sizes) -> dict[str, list[int]]:
    """Return what changes when a file does: inode, size, and the times of modification and of the last change.

    Raises: OSError, if one is missing, of another size or no regular file.
    """
    stamps = {}
    for name, size in sizes.items():
        status = os.lstat(folder / name)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "is no regular file", str(folder / name))
        if status.st_size != size:
            raise OSError(0, f"has {status.st_size:,} bytes, not {size:,}", str(folder / name))
        stamps[name] = [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    return stamps


def _because(error: OSError) -> str:
    return str(error.strerror) if error.errno == 0 else f"cannot be read ({error.strerror})"


def _mark(folder: Path, chunks: Chunks, stamps: Mapping[str, Sequence[int]]) -> str:
    return hash_of_json([boot_id(), str(folder), chunks, stamps])


def _notes() -> Path:
    return user_cache() / "verified"


def _has_note(note: str) -> bool:
    try:
        return (_notes() / note).exists()
    except (OSError, RefusedError):
        return False


def _write_note(note: str) -> None:
    """Write a note, an empty file, and daily remove old ones; without it the files are read at the next start."""
    with contextlib.suppress(OSError, RefusedError):
        folder, now = _notes(), time.time()
        os.makedirs(folder, mode=0o700, exist_ok=True)
        (folder / note).touch()
        swept = folder / _SWEPT
        if swept.exists() and now - swept.stat().st_mtime < _SWEPT_EVERY:
            return  # there may be ten thousands of notes
        swept.touch()
        for entry in os.scandir(folder):
            if now - entry.stat(follow_symlinks=False).st_mtime > _FORGOTTEN_AFTER:
                os.unlink(entry)
