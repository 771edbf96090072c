"""The limits that a shell, the kernel, a container or a file system sets, and what to say when a run meets one."""

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

# What a run costs in descriptors, counted in /proc/PID/fd of runs with 2 and 8 workers.
_OF_THE_COMMAND = 20  # beside its workers'
_OF_A_WORKER = 4  # in the command: its control channel, its signals, its page, its log
_OF_A_RANK = 36  # in the rank itself, and some for each other rank: connections, shared memory
_OF_A_PEER = 4
_TEXTS = {
    "too many open files": errno.EMFILE,
    "file too large": errno.EFBIG,
    "can't start new thread": errno.EAGAIN,
    "cannot allocate memory": errno.ENOMEM,
    "failed to map segment": errno.ENOMEM,
    "can't allocate memory": errno.ENOMEM,
}


def raise_files() -> None:
    """Take all descriptors that the hard limit allows.

    Shells leave 1,024, which is a compatibility for select(2) alone.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass  # a container may refuse what it shows


def check_open_files(workers: int, world_size: int) -> None:
    """See that this command can hold its workers, and a worker its connections.

    Raises:
        RefusedError: the hard limit is too small.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    wanted = max(_OF_THE_COMMAND + _OF_A_WORKER * workers, _OF_A_RANK + _OF_A_PEER * world_size)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        raise RefusedError(
            f"{world_size} worker{'s' if world_size > 1 else ''} need {wanted} open files, and this shell allows "
            f"{limit} "
            f"(ulimit -n): raise it with ulimit -n {wanted} or more, or use fewer workers."
        )


def reason(error: BaseException | str, place: Path | None = None) -> str | None:
    """Return which limit an error means, with its value and how it is raised; None for an error that means none.

    Errors of libraries keep only the text of the system's error. `place` is what could not be written, where the error
    does not name it.
    """
    number = error.errno if isinstance(error, OSError) else None
    text = str(error).lower() if isinstance(error, str | RuntimeError | ImportError | MemoryError | OSError) else ""
    if number is None:
        number = next((known for word, known in _TEXTS.items() if word in text[:20_000]), None)
    if text == os.strerror(errno.EAGAIN).lower():  # of a thread in C++; longer texts speak of sockets
        number = errno.EAGAIN
    if isinstance(error, MemoryError):
        number = errno.ENOMEM
    if number == errno.EMFILE:
        return _said("open files", resource.RLIMIT_NOFILE, "n", 1)
    if number == errno.ENFILE:
        return _open_files()
    if number == errno.EFBIG:
        return _said("KiB a file", resource.RLIMIT_FSIZE, "f", 1024)
    if number == errno.ENOMEM:
        return _said("KiB of address space", resource.RLIMIT_AS, "v", 1024)
    if number == errno.EAGAIN:
        return _processes()
    if number in (errno.ENOSPC, errno.EDQUOT):
        named = error.filename if isinstance(error, OSError) and isinstance(error.filename, str) else None
        place = place or (Path(named) if named else None)
        return _disk(place, number == errno.EDQUOT) if place is not None else None
    return None


def said_with_limit(error: BaseException, place: Path | None = None) -> str:
    """Return what the system says of an error, or its kind and message, and the limit that it means."""
    limit = reason(error, place)
    said = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return f"{said or error}{f' ({limit})' if limit else ''}"


def human(num_bytes: float, digits: int = 3) -> str:
    """Return a number of bytes as people say it. Units: kB is 1,000 bytes."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            exact = f"{num_bytes / size:,.{digits}g}"
            return f"{exact if 'e' not in exact else f'{num_bytes / size:,.0f}'} {unit}"
    return f"{num_bytes:,.0f} bytes"


def told_apart(one: int, other: int) -> tuple[str, str]:
    """Return two numbers of bytes as people say them, with as many digits as it takes to see which is larger."""
    digits = next((digits for digits in range(3, 16) if human(one, digits) != human(other, digits)), 3)
    return human(one, digits), human(other, digits)


def free_files(place: Path) -> int | None:
    """Return how many files (inodes) can still be made at a place; None where its file system does not count them."""
    found = os.statvfs(place)
    return found.f_favail if found.f_files else None


def _said(what: str, which: int, letter: str, unit: int) -> str | None:
    limit = resource.getrlimit(which)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return f"this shell allows {limit // unit:,} {what} (ulimit -{letter}): raise that limit"


def _open_files() -> str | None:
    with suppress(OSError, ValueError):
        used, _, most = map(int, Path("/proc/sys/fs/file-nr").read_text().split())
        return (
            f"fs.file-max allows {most:,} open files on this machine, and {used:,} are open: raise it with sysctl, "
            "as root"
        )
    return None


def _disk(place: Path, is_quota: bool) -> str | None:
    """Say what is used up where something could not be written: bytes, inodes or a quota. Source: statvfs(3)."""
    for folder in (place, *place.absolute().parents):  # what was to be made is not there
        try:
            found = os.statvfs(folder)
        except OSError:
            continue
        free = human(found.f_bavail * found.f_frsize)
        if is_quota:
            return (
                f"a quota on the file system of {folder} is used up, though {free} are free there: quota -s shows yours"
            )
        if found.f_files and not found.f_favail:
            return (
                f"no inodes are left: the file system of {folder} holds all {found.f_files:,} files that it can, "
                f"though {free} are "
                f"free: remove files"
            )
        size, reserved = found.f_blocks * found.f_frsize, (found.f_bfree - found.f_bavail) * found.f_frsize
        kept = f", and {human(reserved)} more are reserved for root" if reserved > 0 else ""
        files = f" and {found.f_favail:,} files" if found.f_files else ""
        return f"{free} of {human(size)}{files} are free on the file system of {folder}{kept}"
    return None


@dataclass(frozen=True)
class _Bound:
    """A limit on processes and threads, and how many it counts now."""

    name: str
    allowed: int
    used: int
    cure: str

    @property
    def share(self) -> float:
        """Return how full it is."""
        return self.used / max(1, self.allowed)

    def __str__(self) -> str:
        return f"{self.name} allows {self.allowed:,} processes and threads and {self.used:,} are there"


_REACHED = 0.9  # of a limit: what was refused may have ended others, or been ended, since
_CURE = "raise that limit, or use fewer workers"
_AS_ROOT = "raise it with sysctl, as root, or use fewer workers"


def _processes(root: Path = Path("/")) -> str | None:
    """Name the limit that has refused a process or a thread: the one that is reached. Source: fork(2), under EAGAIN."""
    bounds = sorted(_bounds(root), key=lambda one: -one.share)
    if not bounds:
        return None
    if bounds[0].share >= _REACHED:
        return f"{bounds[0]}: {bounds[0].cure}"
    if (
        memory := _said("KiB of address space", resource.RLIMIT_AS, "v", 1024)
    ) is not None:  # a thread's stack is of that
        return memory
    return f"which limit it was cannot be seen any more; the fullest is now: {bounds[0]}: {bounds[0].cure}"


def _bounds(root: Path) -> Iterator[_Bound]:
    yield from _pids(root)
    proc = root / "proc"
    counted = list(_counted(proc))
    here = sum(threads for _, threads in counted)
    total = _number(proc / "loadavg", r"\S+ \S+ \S+ \d+/(\d+)") or 0  # of the whole machine, also within a container
    for name in ("pid_max", "threads-max"):
        allowed = _number(proc / "sys/kernel" / name, r"(\d+)")
        if allowed is not None:  # since Linux 6.14 a container has a pid_max of its own, which counts what is in there
            yield _Bound(f"kernel.{name}", allowed, max(here, total if total <= allowed else 0), _AS_ROOT)
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit != resource.RLIM_INFINITY and not _is_privileged(proc):
        used = sum(threads for user, threads in counted if user == os.getuid())
        yield _Bound(f"this shell (ulimit -u, user {os.getuid()})", limit, used, _CURE)


def _counted(proc: Path) -> Iterator[tuple[int, int]]:
    """Yield the user and the number of threads of every process that can be seen."""
    for entry in proc.glob("[0-9]*/status"):
        with suppress(OSError):
            text = entry.read_text()
            user, threads = (
                re.search(r"^Uid:\s+(\d+)", text, re.MULTILINE),
                re.search(r"^Threads:\s+(\d+)", text, re.MULTILINE),
            )
            if user is not None:
                yield int(user[1]), int(threads[1]) if threads is not None else 1


def _is_privileged(proc: Path) -> bool:
    """Tell whether the limit of a user does not bind this process. Source: getrlimit(2), RLIMIT_NPROC."""
    found = _number(proc / "self/status", r"CapEff:\s+([0-9a-f]+)", 16) or 0
    return os.getuid() == 0 or bool(found & (1 << 24 | 1 << 21))  # CAP_SYS_RESOURCE, CAP_SYS_ADMIN


def _number(path: Path, pattern: str, base: int = 10) -> int | None:
    try:
        found = re.search(pattern, path.read_text())
    except OSError:
        return None
    return int(found[1], base) if found is not None else None


def _pids(root: Path) -> Iterator[_Bound]:
    """Yield the control groups that limit processes and threads. Source.

    The kernel's description of the pids controller.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        tops = ["sys/fs/cgroup", "sys/fs/cgroup/unified"] if not controllers else []
        tops += ["sys/fs/cgroup/pids"] if "pids" in controllers.split(",") else []
        for top in tops:
            folder = root / top / path.strip("/")
            while folder != root / top.rpartition("/")[0]:
                allowed = _number(folder / "pids.max", r"(\d+)")  # or the word max
                if allowed is not None:
                    used = _number(folder / "pids.current", r"(\d+)") or 0
                    yield _Bound(str(folder / "pids.max"), allowed, used, _CURE)
                folder = folder.parent
