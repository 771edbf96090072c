"""The CPU cores near a GPU, which are the cores of its NUMA node, as the kernel describes it."""

from __future__ import annotations

import os
from collections.abc import Set
from pathlib import Path

_SYS = Path("/sys")


def bind(pci: str, num_threads: int, root: Path = _SYS) -> None:
    """Keep this thread, and those that it starts, on the cores of the NUMA node of a device, where there is one.

    `pci` is the device's address, such as 0000:3b:00.0.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0)
    cores = chosen(allowed, cores_near(pci, root), num_threads)
    if cores != allowed:
        os.sched_setaffinity(0, cores)


def chosen(allowed: Set[int], near: Set[int], num_threads: int) -> Set[int]:
    """Return the near cores among those that the user, Slurm or a container allows.

    If there are fewer near cores than threads, return all allowed cores.
    """
    cores = allowed & near
    return cores if len(cores) >= max(1, num_threads) else allowed


def cores_near(pci: str, root: Path = _SYS) -> Set[int]:
    """Return the cores of the NUMA node of a device; none if the kernel does not know it, as in most virtual machines.

    Source: the kernel's documentation, sysfs-bus-pci and sysfs-devices-node.
    """
    try:
        node = int((root / "bus/pci/devices" / pci.lower() / "numa_node").read_text())
        text = (root / f"devices/system/node/node{node}/cpulist").read_text() if node >= 0 else ""
    except (OSError, ValueError):
        return frozenset()
    return _cores_in(text.strip())


def _cores_in(text: str) -> Set[int]:
    """Return the numbers in a list such as 0-15,32-47."""
    cores: set[int] = set()
    try:
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            cores |= set(range(int(first), int(last or first) + 1))
    except ValueError:
        return frozenset()
    return cores
