"""The limits that a shell, a batch system or a container sets for processes, and what to say when a run meets one."""

from __future__ import annotations

import errno
import os
import resource
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
    """Take all descriptors that the hard limit allows: shells leave 1,024, which is a compatibility for select(2) alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass  # a container may refuse what it shows


def refuse_few_files(workers: int, world_size: int) -> None:
    """See that this command can hold its workers, and a worker its connections.

    Raises:
        RefusedError: the hard limit is too small.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    wanted = max(_OF_THE_COMMAND + _OF_A_WORKER * workers, _OF_A_RANK + _OF_A_PEER * world_size)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        raise RefusedError(
            f"{world_size} worker{'s' if world_size > 1 else ''} need {wanted} open files, and this shell allows {limit} "
            f"(ulimit -n): raise it with ulimit -n {wanted} or more, or use fewer workers."
        )


def reason(error: BaseException | str) -> str | None:
    """Return which limit an error means, with its value and how it is raised; None for an error that means none.

    Errors of libraries keep only the text of the system's error.
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
    if number == errno.EFBIG:
        return _said("KiB a file", resource.RLIMIT_FSIZE, "f", 1024)
    if number == errno.ENOMEM:
        return _said("KiB of address space", resource.RLIMIT_AS, "v", 1024)
    if number == errno.EAGAIN:
        return _pids() or _said("processes and threads of this user", resource.RLIMIT_NPROC, "u", 1)
    return None


def said_with_limit(error: BaseException) -> str:
    """Return what the system says of an error, or its kind and message, and the limit that it means."""
    limit = reason(error)
    said = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return f"{said or error}{f' ({limit})' if limit else ''}"


def _said(what: str, which: int, letter: str, unit: int) -> str | None:
    limit = resource.getrlimit(which)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return f"this shell allows {limit // unit:,} {what} (ulimit -{letter}): raise that limit"


def _pids(root: Path = Path("/")) -> str | None:
    """Name the control group that has refused a process or a thread. Source: the kernel's description of the pids controller."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        tops = ["sys/fs/cgroup", "sys/fs/cgroup/unified"] if not controllers else []
        tops += ["sys/fs/cgroup/pids"] if "pids" in controllers.split(",") else []
        for top in tops:
            folder = root / top / path.strip("/")
            while folder != root / top.rpartition("/")[0]:
                limit = folder / "pids.max"
                if limit.is_file() and limit.read_text().strip() != "max":
                    return (
                        f"{limit} allows {limit.read_text().strip()} processes and threads: raise that limit, or use fewer workers"
                    )
                folder = folder.parent
    return None
