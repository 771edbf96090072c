"""Detect kills by the kernel's OOM killer, by comparing its counters before the workers start and after a kill."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # bytes; cgroups v1 report no limit as the largest number of pages
_KILLS = r"^oom_kill (\d+)$"
_CURE = (
    "Use a smaller trainer.micro_batch_size or data.num_workers, fewer workers, or more memory (launcher.mem=... "
    "under Slurm)."
)


@dataclass(frozen=True)
class _Counter:
    """A number in a file of the kernel."""

    path: Path
    pattern: str = r"^(\d+)$"

    def read(self) -> int:
        try:
            match = re.search(self.pattern, self.path.read_text(), re.MULTILINE)
        except OSError:
            return 0
        return int(match[1]) if match else 0


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
                    return (
                        f"out of memory: the control group {group.folder} may use {_human(group.limit.read())}. {_CURE}"
                    )
        if self._rose(self._machine):
            return f"out of memory: the kernel has killed a process on this machine for lack of memory. {_CURE}"
        return None

    def _rose(self, counter: _Counter) -> bool:
        return counter.read() > self._before[counter]


def tightest_limit(root: Path = Path("/")) -> tuple[str, int, int] | None:
    """Return the control group with the least room: its folder, its limit, and what is used without the page cache.

    None without a limit. Units: bytes.
    """
    limited = []
    for group in _groups(root):
        limit = group.limit.read()
        if 0 < limit < _UNLIMITED:
            used = _Counter(group.folder / "memory.current").read()
            used = used or _Counter(group.folder / "memory.usage_in_bytes").read()
            cache = _Counter(group.folder / "memory.stat", r"^(?:total_)?inactive_file (\d+)$").read()
            limited.append((str(group.folder), limit, max(0, used - cache)))
    return min(limited, key=lambda group: group[1] - group[2], default=None)


def _groups(root: Path) -> Iterator[_Group]:
    """Yield this process's memory group and its ancestors, of cgroups v1 and v2. Source: cgroups(7)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for top in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                for folder in _up(root / top, path, "memory.events"):
                    full = _Counter(folder / "memory.events.local", r"^oom (\d+)$")
                    yield _Group(
                        folder, _Counter(folder / "memory.max"), full, _Counter(folder / "memory.events", _KILLS)
                    )
        elif "memory" in controllers.split(","):
            for folder in _up(root / "sys/fs/cgroup/memory", path, "memory.oom_control"):
                full, kills = _Counter(folder / "memory.failcnt"), _Counter(folder / "memory.oom_control", _KILLS)
                yield _Group(folder, _Counter(folder / "memory.limit_in_bytes"), full, kills)


def _up(top: Path, path: str, counter: str) -> Iterator[Path]:
    """Yield the folders of a group and its ancestors that count kills."""
    folder = top / path.strip("/")
    # In a container the path may be the host's, which is not visible here: then the top is the container's own group.
    folder = folder if folder.is_dir() else top
    while True:
        if (folder / counter).is_file():
            yield folder
        if folder == top:
            return
        folder = folder.parent


def _human(num_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes:,} bytes"
