"""The output of one worker: a file that the worker writes and the supervisor reads, locked while either lives."""

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
from ddpexp.system.limits import reason_with_limit
from ddpexp.system.secrets import masked

_BLOCK = 1 << 16
_LOCK_SECONDS = 10.0  # for the processes of an earlier start to end
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # from file systems that do not support locks


class Log:
    """A file, not a pipe: a blocked terminal never blocks a worker, and the last output of a dying one is kept."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        """Open `<folder>/<rank>.log`, or without a folder an unnamed temporary file.

        Raises:
            RefusedError: another start keeps writing to it.
        """
        if folder is None:
            self._file: IO[bytes] = _temporary_file()
        else:
            self._file = _open(folder / f"{rank}.log")
            _lock(self._file, folder / f"{rank}.log")
        self._begin()

    @classmethod
    def reading(cls, path: Path) -> Log:
        """Follow a file that another process writes."""
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
        """Return the descriptor for writing; both the worker and the supervisor append."""
        return self._file.fileno()

    def size(self) -> int:
        """Return the number of bytes written so far."""
        return os.fstat(self.fileno()).st_size

    def new_lines(self, last: bool = False, until: float = math.inf) -> list[str]:
        """Return the lines written since the last call within the first `until` bytes of the file.

        With `last`, also an incomplete last line. A line that does not end is returned in parts, of a progress bar
        that carriage returns overwrite only the end is kept, and the null bytes of a hole in the file are left out, so
        that none of them fills the memory.
        """
        lines: list[str] = []
        while block := os.pread(self.fileno(), int(min(_BLOCK, max(0, until - self._read))), self._read):
            self._read += len(block)
            *ended, rest = (self._rest + self._decoder.decode(block).replace("\0", "")).split("\n")
            lines += ended
            self._rest = rest[rest.rstrip("\r").rfind("\r") + 1 :]
            if len(self._rest) > _BLOCK:
                lines.append(self._rest)
                self._rest = ""
        if last and self._rest:
            lines.append(self._rest)
            self._rest = ""
        return [line.removesuffix("\r") for line in lines]

    def skip(self) -> None:
        """Let the next `new_lines` begin here."""
        self._begin()

    def last_lines(self, count: int) -> str:
        """Return the last lines, at least all of faulthandler's output after a crash."""
        begin = max(0, self.size() - _BLOCK)
        text = os.pread(self.fileno(), _BLOCK, begin).decode(errors="replace")
        lines, crash = text.splitlines(), text.rfind("Fatal Python error")
        return "\n".join(lines[-max(count, text[crash:].count("\n") if crash >= 0 else 0) :])

    def text(self, begin: int) -> str:
        """Return the text from the offset `begin` on, up to 256 KiB."""
        return os.pread(self.fileno(), 4 * _BLOCK, begin).decode(errors="replace")

    def add(self, text: str) -> None:
        """Append what the supervisor knows about the worker's end."""
        with suppress(OSError):  # the disk is full: the text is in error.json and on the terminal
            self._file.write(masked(text).encode())

    def close(self) -> None:
        """Close this end of the file."""
        self._file.close()


def _temporary_file() -> IO[bytes]:
    """Return an unnamed file, in memory where no temporary folder can be written, as in a read-only container."""
    try:
        return tempfile.TemporaryFile(buffering=0)
    except OSError:
        return os.fdopen(os.memfd_create("ddpexp-log"), "w+b", buffering=0)


def _open(path: Path) -> IO[bytes]:
    """Open for appending, since an earlier start may have written; symbolic links and pipes are refused."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(
            path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644
        )
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else reason_with_limit(error, path)
        raise RefusedError(f"cannot be written: {why}", place=path) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RefusedError("cannot be written: it is not a regular file", place=path)
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "a+b", buffering=0)


def held_logs(folder: Path) -> list[Path]:
    """Return the ranks' logs in the folder that a command, a worker or a worker's child still holds open."""
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
    """Lock the open file description: the worker inherits it, and the lock ends with the last process that has it."""
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
                f"is in use by {shown}: another start of this run has not ended",
                suggestion="Wait for it, or end it.",
                place=path,
            )
        time.sleep(0.05)


def _try_lock(descriptor: int, kind: int) -> bool:
    """Lock if nobody else has; True also where the file system does not support locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _holders(path: Path) -> list[int]:
    """Return the processes of this host that have the file open, as far as they are visible."""
    pids, target = [], os.path.realpath(path)
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(link) == target for link in (entry / "fd").iterdir()):
                pids.append(int(entry.name))
        except OSError:
            continue  # it has ended, or belongs to another user
    return sorted(pids)
