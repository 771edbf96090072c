"""What a process has used or waited for, from /proc; the watchdog's evidence that a silent rank is alive."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from ddpexp.system.process import children, stat, threads


def cpu_ticks(pid: int | None) -> int:
    """Return the CPU time that a process has used, in the kernel's ticks; 0 for none."""
    fields = stat(pid) if pid is not None else None
    return int(fields[11]) + int(fields[12]) if fields else 0


def cpu_delays(pid: int | None, phase: str) -> dict[int, int]:
    """Return how long each thread of a process was ready to run but waited for a CPU; {} for none.

    Where a rank reads data, its DataLoader workers are included.
    Units: nanoseconds. Source: /proc/PID/task/TID/schedstat, the second number; some kernels have no such file.
    """
    if pid is None:
        return {}
    pids = [pid, *(children(pid) if phase in ("data", "evaluate") else ())]
    delays = {}
    for pid in pids:
        for thread in threads(pid):
            with suppress(OSError, IndexError, ValueError):  # the thread has ended
                delays[int(thread.name)] = int((thread / "schedstat").read_text().split()[1])
    return delays


def seconds_starved(before: Mapping[int, int], now: Mapping[int, int]) -> float:
    """Return the longest time that any thread has waited for a CPU between two samples. Units: seconds."""
    return max((delay - before[thread] for thread, delay in now.items() if thread in before), default=0) / 1e9


def activity_of(pid: int) -> tuple[int, ...]:
    """Return numbers that change while a process computes, reads or writes.

    Units: tenths of a second and KiB, since idle processes use a little of each too.
    """
    try:
        lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        moved: Iterable[int] = (int(lines[name]) >> 10 for name in ("rchar", "wchar"))
    except (OSError, ValueError, KeyError):
        moved = ()
    return (cpu_ticks(pid) * 10 // os.sysconf("SC_CLK_TCK"), *moved)
