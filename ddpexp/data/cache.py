"""Atomic cache folders of prepared data: complete or absent, whatever process dies.

One command at a time prepares, others wait for it, and what a killed command has written is resumed.

Each file has hashes, and a damaged cache is not used. Fast to import: the launching command imports this module.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from ddpexp.data.hashes import chunks_of, damage_of, hash_of_json, remember
from ddpexp.data.npy import write_file
from ddpexp.data.user_cache import user_cache
from ddpexp.errors import RefusedError
from ddpexp.system.files import flush, read_plain_file
from ddpexp.system.limits import reason_with_limit
from ddpexp.system.secrets import masked_tree
from ddpexp.system.terminal import print_message

T = TypeVar("T")

CACHES = ".ddpexp-cache"  # the folder of all caches, in the data folder and in the user's cache folder

_FORMAT = 2  # of identity.json
_IDENTITY = "identity.json"
_TEMP = ".tmp-"
_PARTIAL = ".partial-"  # what `make_cache` has not finished; the rest of the name is that of the cache
_LOCK = ".lock"  # in a partial folder; locked by the command that writes there
_POLL_SECONDS = 0.05
_STALE_AFTER = 3600.0  # seconds: no running process keeps a temporary folder that long
_PARTIAL_STALE_AFTER = 7 * 24 * 3600.0  # seconds after which a partial folder that nobody has resumed is removed
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Cache:
    """A complete cache: its folder and the contents of identity.json."""

    folder: Path
    record: dict[str, Any]


_only_own = False  # see `only_own_caches`


@contextlib.contextmanager
def only_own_caches(condition: bool = True) -> Iterator[None]:
    """Write to the user's cache folder alone in the block, and not beside the data; caches there are still read.

    For data that a run directory names, which anybody may have made.
    """
    global _only_own
    before, _only_own = _only_own, condition or _only_own
    try:
        yield
    finally:
        _only_own = before


def read_cache(folder: Path) -> Cache | None:
    """Open a cache whose files are as they were written; None if there is none, with a warning if it is damaged.

    Reads one small file, and the others whole where they were not found right since this machine was started.
    """
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return None
        text = read_plain_file(folder / _IDENTITY)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        _warn(f"{folder / _IDENTITY} is damaged")
        return None
    try:
        record = json.loads(text)
        if record["format"] != _FORMAT:
            return None
        if record.pop("hash") != hash_of_json(record) or record["cache"] != folder.name:
            raise ValueError
        damage = damage_of(folder, record["sizes"], record["chunks"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        damage = f"{folder / _IDENTITY} is damaged"
    if damage:
        _warn(damage)
    return None if damage else Cache(folder, record)


@cache  # once for each damage, however often a start looks there
def _warn(damage: str) -> None:
    print_message(f"WARNING: {damage}, so this cache is not used, and the data is prepared again")


def cache_name(kind: str, identity: Any) -> str:
    """Return the name of a cache of what `identity`, any JSON value, describes: `kind` and a hash."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def find_cache(bases: Sequence[Path], name: str) -> Cache | None:
    """Return the complete cache `name` from the first base that has it; None if none has."""
    return next((cache for base in bases if (cache := read_cache(base / CACHES / name))), None)


def make_cache(
    bases: Sequence[Path],
    name: str,
    fill: Callable[[Path], Mapping[str, Any]],
    space: str = "some space",
    wait: str = "preparing the same data",
    sources: Sequence[str | Path] = (),
) -> Cache:
    """Return the complete cache `name` from the first base that has it; otherwise write it to the first one possible.

    `fill` writes the files into the folder that it is called with, and returns the record of the cache. The record may
    have `chunks`, with the hashes of files that `fill` has computed itself. The folder may hold files of an earlier
    call that was killed; `fill` resumes there, and at a full disk the files are removed. One command at a time writes;
    the others wait and use its cache. The texts `space` and `wait` are for messages: how much room is needed, and what
    the other command does. `sources` are the files whose content the cache holds: a user who may not read one of them
    may not read the cache.

    Raises: RefusedError, if no base can be written.
    """
    if (cache := find_cache(bases, name)) is not None:
        return cache
    return in_first(bases, lambda base: _resume(base, name, fill, wait, sources), space)


def update_cache(cache: Cache, facts: dict[str, Any]) -> Cache:
    """Record other sources of the same content; if that fails, the next start checks them again."""
    record = cache.record | masked_tree(facts)
    if _only_own and not cache.folder.is_relative_to(user_cache()):
        return Cache(cache.folder, record)
    with contextlib.suppress(OSError):
        put(cache.folder.parent.parent, cache.folder / _IDENTITY, _encoded(record))
    return Cache(cache.folder, record)


def in_first(bases: Sequence[Path], act: Callable[[Path], T], space: str) -> T:
    """Call `act` with the first base that can be written; `space` is how much it needs, for the message."""
    problems = []
    for base in [user_cache()] if _only_own else dict.fromkeys(bases):
        try:
            return act(base)
        except OSError as error:
            problems.append(f"{base}: {reason_with_limit(error, base)}")
    raise RefusedError(
        f"the prepared data, which training reads, could not be written ({'; '.join(problems)})",
        suggestion=f"Free {space}, or set XDG_CACHE_HOME to a folder that can be written.",
    )


def put(base: Path, target: Path, content: bytes) -> None:
    """Write a file below `base` atomically; a link in its place is replaced, not followed."""
    with _temp_folder(base) as temp:
        write_file(temp / "new", content)
        os.replace(temp / "new", target)
    flush(target.parent)


def _resume(
    base: Path, name: str, fill: Callable[[Path], Mapping[str, Any]], wait: str, sources: Sequence[str | Path]
) -> Cache:
    caches = _caches_folder(base)
    folder, partial = caches / name, caches / f"{_PARTIAL}{name}"
    with _locked(partial, folder, wait) as finished:
        if finished is not None:
            return finished
        try:
            facts = fill(partial)
            with _temp_folder(base) as temp:
                return _commit(base, partial, name, facts, temp, sources)
        except OSError as error:
            if error.errno in _FULL:
                _remove(partial)
            raise


@contextlib.contextmanager
def _locked(partial: Path, folder: Path, wait: str) -> Iterator[Cache | None]:
    """Hold the partial folder of a cache, or yield the cache if another command has finished it meanwhile.

    The kernel's lock on a file in it is released when the process ends, however it ends.
    """
    while (finished := read_cache(folder)) is None:
        try:
            os.mkdir(partial, 0o700)
        except FileExistsError:
            if partial.is_symlink() or not partial.is_dir():
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # another command has just begun
                    partial.unlink()
                continue
        try:
            descriptor = os.open(partial / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # another command has just finished
            continue
        try:
            wait_for_lock(descriptor, wait)
            if _is_open_at(descriptor, partial / _LOCK):
                os.utime(descriptor)
                finished = read_cache(folder)  # it may have come between the last look and the lock
                if finished is not None:
                    _remove(partial)
                yield finished
                return
        finally:
            os.close(descriptor)
    yield finished


def _is_open_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still there: not renamed or removed between opening and locking."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def wait_for_lock(descriptor: int, what: str, seconds: float = math.inf) -> None:
    """Lock a file or folder, and wait for the command that has locked it, at most `seconds`; it is doing `what`.

    Returns without the lock after that time, or on a file system without such locks.
    """
    import fcntl  # late, as tempfile

    deadline, reported = time.monotonic() + seconds, False
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not reported:
                print(f"ddpexp: waiting for another command, which is {what}", file=sys.stderr, flush=True)
            reported = True
            time.sleep(_POLL_SECONDS)
        except OSError:
            return


def _commit(
    base: Path, whole: Path, name: str, facts: Mapping[str, Any], temp: Path, sources: Sequence[str | Path] = ()
) -> Cache:
    """Make a filled folder the cache `name`: flushed, with its identity, and renamed."""
    folder = base / CACHES / name
    readers = _readers(base, whole, sources)
    (whole / _IDENTITY).unlink(missing_ok=True)
    sizes = {}
    for path in sorted(whole.rglob("*")):
        if path.name != _LOCK:
            if path.is_file():
                sizes[str(path.relative_to(whole))] = path.stat().st_size
                os.chmod(path, 0o600 | readers)
            flush(path)
    known = facts.get("chunks", {})
    chunks = {**chunks_of(whole, {name: size for name, size in sizes.items() if name not in known}), **known}
    facts = {**masked_tree(facts), "format": _FORMAT, "cache": name, "sizes": sizes, "chunks": chunks}
    record = json.loads(json.dumps(facts))  # as it will be read
    write_file(whole / _IDENTITY, _encoded(record))
    os.chmod(whole / _IDENTITY, 0o600 | readers)
    os.chmod(whole, 0o700 | readers | readers >> 2)
    flush(whole)
    _move_in(whole, folder, temp)
    flush(folder.parent)
    (folder / _LOCK).unlink(missing_ok=True)
    remember(folder, sizes, chunks)
    return Cache(folder, record)


def _readers(base: Path, whole: Path, sources: Sequence[str | Path]) -> int:
    """Return the permissions to read that a cache in `base` gives to its group and to others.

    A class of users may read the cache if it may read every source. The permission of a source's group counts only
    where the cache has the same group.
    """
    group = os.stat(whole).st_gid
    readers = 0o044
    for source in sources:
        readers &= _readers_of(os.stat(source), group)
    beside = {Path(place) for place in {os.path.dirname(source) for source in sources}}  # few, where sources are many
    above = {folder for place in beside for folder in (place, *place.parents) if folder.is_relative_to(base)}
    for folder in {base} | above:
        status = os.stat(folder)
        readers &= (
            _readers_of(status, group) & status.st_mode << 2
        )  # a user who may not enter a folder may not read its files
    return readers


def _readers_of(status: os.stat_result, group: int) -> int:
    """Return the permissions to read, of group and others."""
    return status.st_mode & (0o044 if status.st_gid == group or status.st_mode & 0o004 else 0o004)


def _encoded(record: Mapping[str, Any]) -> bytes:
    """Return the contents of identity.json: the record with its own hash."""
    return json.dumps({**record, "hash": hash_of_json(record)}, indent=1).encode()


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
            _remove(whole)
            return
        with contextlib.suppress(FileNotFoundError):  # another process has moved it away
            os.rename(folder, temp / f"old-{attempt}")
    raise OSError(errno.EBUSY, "other processes keep putting damaged caches there", str(folder))


@contextlib.contextmanager
def _temp_folder(base: Path) -> Iterator[Path]:
    """Yield a temporary folder on the file system of `base`, and remove old ones of killed processes."""
    import tempfile  # late: most starts find a cache and write nothing

    temp = Path(tempfile.mkdtemp(prefix=_TEMP, dir=_caches_folder(base)))
    try:
        yield temp
    finally:
        _remove(temp)


def _caches_folder(base: Path) -> Path:
    """Make the folder of all caches, and remove old leftovers of killed processes in it."""
    os.makedirs(base, mode=0o700 if base == user_cache() else 0o777, exist_ok=True)
    caches = base / CACHES
    with contextlib.suppress(FileExistsError):
        os.mkdir(caches)
    if not stat.S_ISDIR(os.lstat(caches).st_mode):
        raise RefusedError(
            "is a link or a file, not a folder: writing there could change other data",
            suggestion="Remove it.",
            place=caches,
        )
    for entry in os.scandir(caches):
        with contextlib.suppress(OSError):
            if entry.name.startswith(_TEMP) and time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE_AFTER:
                _remove(Path(entry.path))
            elif entry.name.startswith(_PARTIAL) and not entry.is_symlink():
                _remove_abandoned(Path(entry.path))
    return caches


def _remove_abandoned(partial: Path) -> None:
    """Remove an old partial folder that no command is writing to."""
    import fcntl  # late, as tempfile

    if time.time() - os.stat(partial / _LOCK).st_mtime < _PARTIAL_STALE_AFTER:
        return
    with open(partial / _LOCK, "rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises OSError if a command holds it
        _remove(partial)


def _remove(path: Path) -> None:
    import shutil  # late, as tempfile

    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
