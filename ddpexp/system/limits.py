"""Limits set by the shell, the kernel, a container or a file system, and the messages for runs that reach one."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddpexp.errors import RefusedError
from ddpexp.system.control_groups import control_groups
from ddpexp.system.text import counted, size_text

# Open descriptors of a run, counted in /proc/PID/fd of runs with 2 and 8 workers.
_COMMAND_FILES = 20  # of the command itself
_FILES_PER_WORKER = 4  # of the command, for each worker: control channel, signals, shared page, log
_RANK_FILES = 36  # of a rank itself
_FILES_PER_PEER = 4  # of a rank, for each other rank: connections, shared memory
EXIT_NO_MEMORY = 127
"""The exit code of a program that the dynamic loader had no memory for, and of a fork server without memory."""

_ERRNO_BY_TEXT = {
    "memoryerror": errno.ENOMEM,
    "too many open files": errno.EMFILE,
    "file too large": errno.EFBIG,
    "can't start new thread": errno.EAGAIN,
    "cannot allocate memory": errno.ENOMEM,
    "failed to map segment": errno.ENOMEM,
    "can't allocate memory": errno.ENOMEM,
}


def raise_files() -> None:
    """Raise the limit on open files to the hard limit.

    Shells default to 1,024 only for programs that use select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass  # a container may refuse the limit that it reports


def holds_command() -> bool:
    """Return whether the limit on open files leaves room for the command itself and its fork server."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit == resource.RLIM_INFINITY or limit >= _COMMAND_FILES


def check_open_files(workers: int, world_size: int) -> None:
    """Check that this command can hold its workers' files, and a worker its connections.

    Raises:
        RefusedError: the hard limit is too small.
    """
    limit, required = resource.getrlimit(resource.RLIMIT_NOFILE)[0], required_open_files(workers, world_size)
    if limit != resource.RLIM_INFINITY and limit < required:
        raise RefusedError(
            f"{counted(world_size, 'worker')} need {required} open files, and this shell allows {limit} (ulimit -n)",
            suggestion=f"Raise it with ulimit -n {required} or more, or use fewer workers.",
        )


def required_open_files(workers: int, world_size: int) -> int:
    """Return how many open files the command, or one of its ranks, needs: the larger number."""
    return max(_COMMAND_FILES + _FILES_PER_WORKER * workers, _RANK_FILES + _FILES_PER_PEER * world_size)


def process_limits(root: Path = Path("/")) -> list[tuple[str, int, int]]:
    """Return every limit on processes and threads: its name, how many it allows, and how many there are."""
    return [(bound.name, bound.allowed, bound.used) for bound in _bounds(root)]


def reason(error: BaseException | str, path: Path | None = None) -> str | None:
    """Return which limit caused an error, its value and how to raise it; None if the error is not about a limit.

    Libraries often keep only the text of the system's error. `path` is what could not be written, where the error
    does not name it.
    """
    number = error.errno if isinstance(error, OSError) else None
    text = str(error).lower() if isinstance(error, str | RuntimeError | ImportError | MemoryError | OSError) else ""
    if number is None:
        number = next((code for phrase, code in _ERRNO_BY_TEXT.items() if phrase in text[:20_000]), None)
    if text == os.strerror(errno.EAGAIN).lower():  # from starting a thread in C++; longer texts are about sockets
        number = errno.EAGAIN
    if isinstance(error, MemoryError):
        number = errno.ENOMEM
    if number == errno.EMFILE:
        return _describe_rlimit("open files", resource.RLIMIT_NOFILE, "n", 1)
    if number == errno.ENFILE:
        return _describe_file_max()
    if number == errno.EFBIG:
        return _describe_rlimit("KiB a file", resource.RLIMIT_FSIZE, "f", 1024)
    if number == errno.ENOMEM:
        data = _describe_rlimit("KiB of data", resource.RLIMIT_DATA, "d", 1024)
        return _describe_rlimit("KiB of address space", resource.RLIMIT_AS, "v", 1024) or data
    if number == errno.EAGAIN:
        return _describe_process_limit()
    if "no usable temporary directory" in text:  # Source: Python's tempfile.gettempdir
        return "set TMPDIR to a folder that can be written, or start the container with --tmpfs /tmp"
    if number in (errno.ENOSPC, errno.EDQUOT):
        filename = error.filename if isinstance(error, OSError) and isinstance(error.filename, str) else None
        path = path or (Path(filename) if filename else None)
        return _describe_disk(path, number == errno.EDQUOT) if path is not None else None
    return None


def reason_with_limit(error: BaseException, path: Path | None = None) -> str:
    """Describe an error by the system's text for it, or its class and message, and the limit that caused it."""
    limit = reason(error, path)
    own = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    text = error.strerror if isinstance(error, OSError) else own
    return f"{text or error}{f' ({limit})' if limit else ''}"


def number_in(path: Path, pattern: str, base: int = 10) -> int | None:
    """Return the number that a pattern finds in a file of the kernel; None if it finds none."""
    try:
        match = re.search(pattern, path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1], base) if match is not None else None


def free_files(path: Path) -> int | None:
    """Return how many inodes are free on the path's file system; None where it does not count them."""
    status = os.statvfs(path)
    return status.f_favail if status.f_files else None


def _describe_rlimit(what: str, limit_number: int, letter: str, unit: int) -> str | None:
    limit = resource.getrlimit(limit_number)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return f"this shell allows {limit // unit:,} {what} (ulimit -{letter}): raise that limit"


def _describe_file_max() -> str | None:
    with suppress(OSError, ValueError):
        used, _, maximum = map(int, Path("/proc/sys/fs/file-nr").read_text().split())
        return (
            f"fs.file-max allows {maximum:,} open files on this machine, and {used:,} are open: raise it with sysctl, "
            "as root"
        )
    return None


def _describe_disk(path: Path, is_quota: bool) -> str | None:
    """Describe what is exhausted where a write failed: bytes, inodes or a quota. Source: statvfs(3)."""
    for folder in (path, *path.absolute().parents):  # the path itself may not exist yet
        try:
            status = os.statvfs(folder)
        except OSError:
            continue
        free = size_text(status.f_bavail * status.f_frsize)
        if is_quota:
            return (
                f"a quota on the file system of {folder} is used up, though {free} are free there: quota -s shows yours"
            )
        if status.f_files and not status.f_favail:
            return (
                f"no inodes are left: the file system of {folder} holds all {status.f_files:,} files that it can, "
                f"though {free} are free: remove files"
            )
        size, reserved = status.f_blocks * status.f_frsize, (status.f_bfree - status.f_bavail) * status.f_frsize
        for_root = f", and {size_text(reserved)} more are reserved for root" if reserved > 0 else ""
        files = f" and {status.f_favail:,} files" if status.f_files else ""
        return f"{free} of {size_text(size)}{files} are free on the file system of {folder}{for_root}"
    return None


@dataclass(frozen=True)
class _Bound:
    """A limit on processes and threads, with the current count."""

    name: str
    allowed: int
    used: int
    remedy: str

    @property
    def share(self) -> float:
        """Return the fraction that is used."""
        return self.used / max(1, self.allowed)

    def __str__(self) -> str:
        return f"{self.name} allows {self.allowed:,} processes and threads and {self.used:,} are there"


_REACHED = 0.9  # of a limit: processes may have ended since the failure
_REMEDY = "raise that limit, or use fewer workers"
_AS_ROOT = "raise it with sysctl, as root, or use fewer workers"


def _describe_process_limit(root: Path = Path("/")) -> str | None:
    """Describe the limit that prevented a new process or thread. Source: fork(2), EAGAIN."""
    bounds = sorted(_bounds(root), key=lambda bound: -bound.share)
    if not bounds:
        return None
    if bounds[0].share >= _REACHED:
        return f"{bounds[0]}: {bounds[0].remedy}"
    memory = _describe_rlimit("KiB of address space", resource.RLIMIT_AS, "v", 1024)
    if memory is not None:  # a thread's stack counts against it
        return memory
    return f"it is no longer possible to see which limit it was; the fullest now is: {bounds[0]}: {bounds[0].remedy}"


def _bounds(root: Path) -> Iterator[_Bound]:
    yield from _pids(root)
    proc = root / "proc"
    processes = list(_visible_processes(proc))
    here = sum(threads for _, threads in processes)
    total = number_in(proc / "loadavg", r"\S+ \S+ \S+ \d+/(\d+)") or 0  # of the whole host, even inside a container
    for name in ("pid_max", "threads-max"):
        allowed = number_in(proc / "sys/kernel" / name, r"(\d+)")
        if allowed is not None:
            # Since Linux 6.14 a container can have its own pid_max, which counts only its processes.
            yield _Bound(f"kernel.{name}", allowed, max(here, total if total <= allowed else 0), _AS_ROOT)
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit != resource.RLIM_INFINITY and not _is_privileged(proc):
        used = sum(threads for user, threads in processes if user == os.getuid())
        yield _Bound(f"this shell (ulimit -u, user {os.getuid()})", limit, used, _REMEDY)


def _visible_processes(proc: Path) -> Iterator[tuple[int, int]]:
    """Yield the user id and the number of threads of every visible process."""
    for entry in proc.glob("[0-9]*/status"):
        with suppress(OSError):
            text = entry.read_text()
            user = re.search(r"^Uid:\s+(\d+)", text, re.MULTILINE)
            threads = re.search(r"^Threads:\s+(\d+)", text, re.MULTILINE)
            if user is not None:
                yield int(user[1]), int(threads[1]) if threads is not None else 1


def _is_privileged(proc: Path) -> bool:
    """Return whether this process is exempt from the per-user limit. Source: getrlimit(2), RLIMIT_NPROC."""
    capabilities = number_in(proc / "self/status", r"CapEff:\s+([0-9a-f]+)", 16) or 0
    return os.getuid() == 0 or bool(capabilities & (1 << 24 | 1 << 21))  # CAP_SYS_RESOURCE, CAP_SYS_ADMIN


def _pids(root: Path) -> Iterator[_Bound]:
    """Yield the control groups that limit processes and threads. Source: the kernel's docs on the pids controller."""
    for folder, _ in control_groups("pids", root):
        allowed = number_in(folder / "pids.max", r"(\d+)")  # "max" means no limit
        if allowed is not None:
            used = number_in(folder / "pids.current", r"(\d+)") or 0
            yield _Bound(str(folder / "pids.max"), allowed, used, _REMEDY)
