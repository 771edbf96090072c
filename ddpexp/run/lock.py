"""The lock of a run directory: a file that the leading command keeps locked as long as it runs."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ddpexp.errors import RefusedError, subject
from ddpexp.launch.workers import cleanup
from ddpexp.launch.workers.rank_log import held_logs
from ddpexp.system import process
from ddpexp.system.containers import HOST_PID_NAMESPACE, pid_namespace
from ddpexp.system.job_schedulers import ScheduledJob, current_job, owner_keys, owning_job
from ddpexp.system.limits import reason_with_limit
from ddpexp.system.network import boot_id
from ddpexp.system.terminal import print_message

NAME = "lock"
_WAIT_SECONDS = 10.0  # for the ranks of a killed command to exit
_REPORT_AFTER_SECONDS = 1.0
_POLL_SECONDS = 0.05
_RACE_SECONDS = 0.2
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S%z"
_NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)


@dataclass(frozen=True)
class Owner:
    """The command that owns a run directory, as the lock file records it."""

    host: str
    boot_id: str
    pid: int
    started: str  # start time of the process as the kernel counts it: a later process with the same PID has another one
    job: ScheduledJob | None
    since: str
    pid_namespace: str = ""  # of `pid`

    @classmethod
    def here(cls) -> Owner:
        """Describe this process."""
        pid, since = os.getpid(), time.strftime(_TIME_FORMAT)
        return cls(platform.node(), boot_id(), pid, _started(pid) or "", current_job(), since, pid_namespace())

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Owner:
        """Return the owner that a lock file records. Raises KeyError and ValueError for records that are invalid."""
        host, boot, pid, started, since = (record[name] for name in ("host", "boot_id", "pid", "started", "since"))
        return cls(host, boot, pid, started, owning_job(record), since, record.get("pid_namespace", ""))

    def as_record(self) -> dict[str, Any]:
        """Return what the lock file records."""
        process = {"host": self.host, "boot_id": self.boot_id, "pid": self.pid, "started": self.started}
        if self.pid_namespace:
            process["pid_namespace"] = self.pid_namespace
        return {**process, **owner_keys(self.job), "since": self.since}

    def is_alive(self) -> bool | None:
        """Return whether the command is still running; None if that cannot be checked from this host."""
        if self.host == platform.node():
            if self.boot_id == boot_id() and self.pid_namespace in ("", pid_namespace()):
                return _started(self.pid) == self.started
            if self.boot_id != boot_id() and self.pid_namespace in ("", HOST_PID_NAMESPACE):
                return False  # this host has been started again since
            # Containers of one name: another one's processes are not visible here.
        if self.job is not None:
            over = self.job.is_over()
            return None if over is None else not over
        return None

    def __str__(self) -> str:
        """Return the process and its host for messages."""
        job = f" ({self.job})" if self.job is not None else ""
        return f"process {self.pid} on {self.host}{job}"


class Lock:
    """A held lock."""

    def __init__(self, descriptor: int) -> None:
        """Keep the open file; on a file system without locks, its contents are the lock."""
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Release the lock and clear the owner. The end of the process releases it too, but leaves the owner."""
        if self._descriptor is None:
            return
        with suppress(OSError):  # the disk is full
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)
        self._descriptor = None


def take(folder: Path, ranks: Path, name: str) -> Lock:
    """Take the lock of a run directory.

    `name` is its name in errors, and `ranks` the folder of the ranks' logs. Waits for the ranks of a killed command,
    which exit a moment after it.

    Raises:
        RefusedError: a running command, or a rank of a dead one, uses the directory; or it cannot be locked.
    """
    path, deadline = folder / NAME, time.monotonic() + _WAIT_SECONDS
    try:
        descriptor = _open(path)
    except OSError as error:
        raise RefusedError(f"cannot be locked: {path}: {error.strerror}", **subject(name)) from None
    flocked = True
    try:
        try:
            _wait_for_owner(descriptor, path, name, deadline)
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise RefusedError(f"cannot be locked: {path}: {error.strerror}", **subject(name)) from None
            flocked = False
            _check_gone(descriptor, path, name)
        if not _is_at(descriptor, path):
            raise RefusedError(
                "Its lock was removed while this command took it",
                suggestion="Start the command again.",
                **subject(name),
            )
        _wait_for_ranks(ranks, name, deadline)
        if (previous := _owner(descriptor)) is not None:  # it was killed: otherwise it would have removed its record
            _clear_shared_memory(previous)
        owner = Owner.here()
        try:
            _write(descriptor, owner)
        except OSError as error:
            raise RefusedError(f"cannot be written: {reason_with_limit(error, path)}", **subject(name)) from None
        if not flocked:
            time.sleep(_RACE_SECONDS)  # of two commands that found no owner, the last one to write wins
            if read(path) != owner:
                raise _in_use(name, read(path))
    except BaseException:
        os.close(descriptor)
        raise
    return Lock(descriptor)


def read(path: Path) -> Owner | None:
    """Return the current or last owner of the lock; None if the file names none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return _owner(descriptor)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """Open or create the file; links are not followed, since they may lead anywhere."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link") from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file")


def _wait_for_owner(descriptor: int, path: Path, name: str, deadline: float) -> None:
    report_at = deadline - _WAIT_SECONDS + _REPORT_AFTER_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(descriptor)
            if owner is not None and owner.is_alive():
                raise _in_use(name, owner) from None
            if time.monotonic() > deadline:
                raise RefusedError(
                    f"{name} is still in use after {_WAIT_SECONDS:.0f} s: {path} is locked, and "
                    f"{owner or 'its owner'} cannot be checked from this host",
                    suggestion="Wait for its end, or end it there.",
                ) from None
        report_at = _report_waiting(
            report_at, f"{name} is locked by a command that has exited: waiting for its other processes to exit"
        )
        time.sleep(_POLL_SECONDS)


def _check_gone(descriptor: int, path: Path, name: str) -> None:
    """Check the owner that the file names, on a file system without locks."""
    owner = _owner(descriptor)
    is_alive = owner is not None and owner.is_alive()
    if owner is not None and is_alive is None:
        raise RefusedError(
            f"was taken by {owner} at {owner.since}, and whether it is still running cannot be checked from this host "
            "(this file system has no locks)",
            **subject(name),
            suggestion=f"End it there, or remove {path} when no process uses the run any more.",
        )
    if is_alive:
        raise _in_use(name, owner)


def _wait_for_ranks(ranks: Path, name: str, deadline: float) -> None:
    report_at = deadline - _WAIT_SECONDS + _REPORT_AFTER_SECONDS
    while held := held_logs(ranks):
        if time.monotonic() > deadline:
            numbers = ", ".join(path.stem for path in held)
            raise RefusedError(
                f"is still in use after {_WAIT_SECONDS:.0f} s: rank {numbers} of a command that has exited is still "
                f"alive and writes to {held[0]}",
                **subject(name),
                suggestion=f"End it (fuser -k {held[0]}).",
            )
        report_at = _report_waiting(
            report_at, f"{name}: ranks of a command that has exited are still alive: waiting for them to exit"
        )
        time.sleep(_POLL_SECONDS)


def _clear_shared_memory(previous: Owner) -> None:
    """Remove files in shared memory that the ranks of a killed command left, if they ran on this host.

    The command removes them when it outlives its ranks; if all of them are killed at once, nobody does until now.
    """
    if (previous.host, previous.boot_id) == (platform.node(), boot_id()):
        with suppress(ValueError, TypeError):  # the record is invalid
            cleanup.clear(datetime.strptime(previous.since, _TIME_FORMAT).timestamp())


def _report_waiting(at: float, text: str) -> float:
    """Report once, after a moment, what the command is waiting for."""
    if time.monotonic() < at:
        return at
    print_message(f"ddpexp: {text}")
    return float("inf")


def _in_use(name: str, owner: Owner | None) -> RefusedError:
    since = f" since {owner.since}" if owner is not None else ""
    reason = f"is in use by {owner or 'another command'}{since}"
    return RefusedError(reason, suggestion="Wait for its end, or end it.", **subject(name))


def _owner(descriptor: int) -> Owner | None:
    try:
        values = json.loads(os.pread(descriptor, 1 << 16, 0))
        owner = Owner.of_record(values)
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError):
        return None
    return owner if isinstance(owner.pid, int) else None


def _write(descriptor: int, owner: Owner) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(owner.as_record()) + "\n").encode(), 0)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        opened, current = os.fstat(descriptor), os.lstat(path)
    except OSError:
        return False
    return (opened.st_dev, opened.st_ino) == (current.st_dev, current.st_ino)


def _started(pid: int) -> str | None:
    """Return the start time of a process; None if it has exited."""
    fields = process.stat(pid)
    return None if fields is None or fields[0] in "ZX" else fields[19]
