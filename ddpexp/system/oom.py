"""Whether the kernel has killed for want of memory: its counters before the workers start, and after one was killed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # bytes; version 1 shows no limit as the largest number of pages
_KILLS = r"^oom_kill (\d+)$"
_CURE = (
    "Use a smaller trainer.micro_batch_size or data.num_workers, fewer workers, or more memory (launcher.mem=... "
    "under Slurm)."
)


@dataclass(frozen=True)
class _Counter:
    """A number in a file of the kernel's."""

    path: Path
    pattern: str = r"^(\d+)$"

    def read(self) -> int:
        try:
            found = re.search(self.pattern, self.path.read_text(), re.MULTILINE)
        except OSError:
            return 0
        return int(found[1]) if found else 0


@dataclass(frozen=True)
class _Group:
    """A control group: what it may use, how often it was full, how often the kernel has killed in it."""

    folder: Path
    limit: _Counter
    full: _Counter
    kills: _Counter


class Memory:
    """What the kernel counts, since this was made."""

    def __init__(self, root: Path = Path("/")) -> None:
        """Note the counters as they are; `root` is where /proc and /sys lie."""
        self._groups = list(_groups(root))
        self._machine = _Counter(root / "proc/vmstat", _KILLS)
        counters = [self._machine, *(counter for group in self._groups for counter in (group.full, group.kills))]
        self._before = {counter: counter.read() for counter in counters}

    def verdict(self) -> str | None:
        """Say that the kernel has killed for want of memory meanwhile, and what to do.

        None when it has counted no such kill.
        """
        if any(map(self._rose, (group.kills for group in self._groups))):
            for group in self._groups:  # the nearest first
                if 0 < group.limit.read() < _UNLIMITED and self._rose(group.full):
                    return (
                        f"out of memory: the control group {group.folder} may use {_human(group.limit.read())}. {_CURE}"
                    )
        if self._rose(self._machine):
            return f"out of memory: the kernel has killed for want of memory on this machine. {_CURE}"
        return None

    def _rose(self, counter: _Counter) -> bool:
        return counter.read() > self._before[counter]


def _groups(root: Path) -> Iterator[_Group]:
    """Yield this process's memory group and those above it, of both versions. Source: cgroups(7)."""
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
    """Yield the folders of a group and of those above it that count kills."""
    folder = top / path.strip("/")
    # In a container the path may be the host's, which is not seen here: then the top is the container's own group.
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
