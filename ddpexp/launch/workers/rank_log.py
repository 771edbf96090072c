"""The output of one worker: a file that the worker writes and the watcher reads, locked as long.

As one of them lives.
"""

from __future__ import annotations

import codecs
import errno
import fcntl
import math
import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from ddpexp.errors import RefusedError
from ddpexp.system.limits import said_with_limit

_BLOCK = 1 << 16
_LOCK_SECONDS = 10.0  # for the processes of a start before this one to end
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # what a file system without them says


class Log:
    """A file, not a pipe: a stopped terminal never stops a worker, and what a dying one wrote is there."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        """Make `<folder>/<rank>.log`, or without a folder a file that has no name and is gone with its last reader.

        Raises:
            RefusedError: another start writes to it, and does not end.
        """
        if folder is None:
            self._file: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        else:
            self._file = _open(folder / f"{rank}.log")
            _lock(self._file, folder / f"{rank}.log")
        self._begin()

    @classmethod
    def reading(cls, path: Path) -> Log:
        """Follow a file that somebody else writes."""
        log = cls.__new__(cls)
        log._file = path.open("rb", buffering=0)
        log._begin()
        log._read = 0
        return log

    def _begin(self) -> None:
        self._read = self.size()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def fileno(self) -> int:
        """Return the descriptor to write to; both ends append."""
        return self._file.fileno()

    def size(self) -> int:
        """Return the number of bytes written so far."""
        return os.fstat(self.fileno()).st_size

    def new_lines(self, last: bool = False, until: float = math.inf) -> list[str]:
        """Return the lines written since the last call, in the first `until` bytes.

        With `last` also one that has no end.
        """
        text = self._rest
        while block := os.pread(self.fileno(), int(min(_BLOCK, max(0, until - self._read))), self._read):
            self._read += len(block)
            text += self._decoder.decode(block)
        *lines, self._rest = text.split("\n")
        if last and self._rest:
            lines.append(self._rest)
        return [line.removesuffix("\r") for line in lines]

    def last_lines(self, count: int) -> str:
        """Return the end of what was written; of a crash all that Python has said of it."""
        begin = max(0, self.size() - _BLOCK)
        text = os.pread(self.fileno(), _BLOCK, begin).decode(errors="replace")
        lines, crash = text.splitlines(), text.rfind("Fatal Python error")
        return "\n".join(lines[-max(count, text[crash:].count("\n") if crash >= 0 else 0) :])

    def text(self, begin: int) -> str:
        """Return what was written from a place on, as far as it is sensible to look at."""
        return os.pread(self.fileno(), 4 * _BLOCK, begin).decode(errors="replace")

    def add(self, text: str) -> None:
        """Append what the watcher knows of the worker's end."""
        with suppress(OSError):  # the disk is full: it is in error.json, and on the terminal
            self._file.write(text.encode())

    def close(self) -> None:
        """Close the watcher's end."""
        self._file.close()


def _open(path: Path) -> IO[bytes]:
    """Open to append, for an attempt before this one may have written; a link or a pipe may lead anywhere."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(
            path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644
        )
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else said_with_limit(error, path)
        raise RefusedError(f"{path} cannot be written: {why}.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RefusedError(f"{path} cannot be written: it is not a regular file.")
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "a+b", buffering=0)


def held_logs(folder: Path) -> list[Path]:
    """Return the ranks' logs in the folder that a command, a worker or a child of one still holds."""
    return [path for path in sorted(folder.glob("*.log")) if path.stem.isdecimal() and _is_held(path)]


def _is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _lock(file: IO[bytes], path: Path) -> None:
    """Lock for this open file: the worker gets the same one, and the lock ends with the last process that has it."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while not _try_lock(file.fileno(), fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            file.close()
            pids = _holders(path)
            shown = (
                f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}"
                if pids
                else "a process on another host"
            )
            raise RefusedError(
                f"{path} is in use by {shown}: another start of this run has not ended. Wait for it, or end it."
            )
        time.sleep(0.05)


def _try_lock(descriptor: int, kind: int) -> bool:
    """Lock if nobody else has; True also where the file system knows no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _holders(path: Path) -> list[int]:
    """Return the processes of this host that have the file open, as far as they can be seen."""
    found, wanted = [], os.path.realpath(path)
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(link) == wanted for link in (entry / "fd").iterdir()):
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended, or is another user's
    return sorted(found)
