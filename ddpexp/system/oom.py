"""Detect kills by the kernel's OOM killer, by comparing its counters before the workers start and after a kill."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddpexp.system.control_groups import control_groups
from ddpexp.system.limits import number_in
from ddpexp.system.text import binary_size_text

_UNLIMITED = 1 << 60  # bytes; cgroups v1 report no limit as the largest number of pages
_KILLS = r"^oom_kill (\d+)$"
_REMEDY = (
    "Use a smaller trainer.micro_batch_size or data.num_workers, fewer workers, or more memory (launcher.mem=... "
    "under Slurm)."
)


@dataclass(frozen=True)
class _Counter:
    """A number in a file of the kernel."""

    path: Path
    pattern: str = r"^(\d+)$"

    def read(self) -> int:
        return number_in(self.path, self.pattern) or 0


@dataclass(frozen=True)
class _Group:
    """A control group: its memory limit, how often that was reached, and the number of OOM kills in it."""

    folder: Path
    limit: _Counter
    full: _Counter
    kills: _Counter


class Memory:
    """The kernel's OOM counters since this object was created."""

    def __init__(self, root: Path = Path("/")) -> None:
        """Record the current counters; `root` is the folder that holds /proc and /sys."""
        self._groups = list(_groups(root))
        self._machine = _Counter(root / "proc/vmstat", _KILLS)
        counters = [self._machine, *(counter for group in self._groups for counter in (group.full, group.kills))]
        self._before = {counter: counter.read() for counter in counters}

    def verdict(self) -> str | None:
        """Return a message on the OOM kill since then and its remedy; None if the kernel counted no such kill."""
        if any(map(self._rose, (group.kills for group in self._groups))):
            for group in self._groups:  # the nearest first
                if 0 < group.limit.read() < _UNLIMITED and self._rose(group.full):
                    limit = binary_size_text(group.limit.read())
                    return f"out of memory: the control group {group.folder} may use {limit}. {_REMEDY}"
        if self._rose(self._machine):
            return f"out of memory: the kernel has killed a process on this machine for lack of memory. {_REMEDY}"
        return None

    def _rose(self, counter: _Counter) -> bool:
        return counter.read() > self._before[counter]


def tightest_limit(root: Path = Path("/")) -> tuple[str, int, int] | None:
    """Return the folder, the limit and the use, without the page cache, of the control group with the least room.

    None without a limit. Units: bytes.
    """
    limited = []
    for folder, version in control_groups("memory", root):
        limit = _Counter(folder / _FILES[version][0]).read()
        if 0 < limit < _UNLIMITED:
            used = _Counter(folder / _FILES[version][1]).read()
            name = "inactive_file" if version == 2 else "total_inactive_file"
            cache = _Counter(folder / "memory.stat", rf"^{name} (\d+)$").read()
            limited.append((str(folder), limit, max(0, used - cache)))
    return min(limited, key=lambda group: group[1] - group[2], default=None)


def memory_left(root: Path = Path("/")) -> int | None:
    """Return how much more memory the control groups allow this process; None without a limit. Units: bytes."""
    tightest = tightest_limit(root)
    return None if tightest is None else max(0, tightest[1] - tightest[2])


_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}


def _groups(root: Path) -> Iterator[_Group]:
    """Yield this process's memory group and its ancestors that count kills."""
    for folder, version in control_groups("memory", root):
        limit = _Counter(folder / _FILES[version][0])
        if version == 2 and (folder / "memory.events").is_file():
            full = _Counter(folder / "memory.events.local", r"^oom (\d+)$")
            yield _Group(folder, limit, full, _Counter(folder / "memory.events", _KILLS))
        elif version == 1 and (folder / "memory.oom_control").is_file():
            full, kills = _Counter(folder / "memory.failcnt"), _Counter(folder / "memory.oom_control", _KILLS)
            yield _Group(folder, limit, full, kills)


def available_bytes(root: Path = Path("/")) -> int:
    """Return how much memory this process can still get: of the machine, or within its control groups."""
    with (root / "proc/meminfo").open() as file:
        free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    left = memory_left(root)
    return free if left is None else min(free, left)


def bound_memory(part: float = 1.0) -> None:
    """Let an allocation that this machine has no memory for fail, instead of waking the kernel's OOM killer.

    `part`: of the memory that is free, how much this process may take.
    """
    limit, (soft, hard) = private_bytes() + int(part * available_bytes()), resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def private_bytes() -> int:
    """Return the private writable memory of this process. Source: proc(5), VmData. Units: bytes."""
    return _of_this_process("VmData")


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM. Source: proc(5), VmRSS. Units: bytes."""
    return _of_this_process("VmRSS")


def peak_bytes() -> int:
    """Return the most of this process that has been in RAM. Source: proc(5), VmHWM. Units: bytes."""
    return _of_this_process("VmHWM")


def _of_this_process(name: str) -> int:
    with open("/proc/self/status") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:")), 0)
