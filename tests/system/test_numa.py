"""The cores near a GPU, by recorded trees of sysfs, and a process that is bound to them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ddpexp.system.numa import bind, chosen, cores_near

GPU = "0000:3B:00.0"


def recorded(root: Path, node: str, cpulist: str = "0-15,32-47\n") -> Path:
    """Write what a server with two nodes shows of a GPU."""
    device, memory = root / "bus/pci/devices/0000:3b:00.0", root / "devices/system/node/node1"
    for folder in (device, memory):
        folder.mkdir(parents=True)
    (device / "numa_node").write_text(node)
    (memory / "cpulist").write_text(cpulist)
    return root


def test_the_cores_of_a_gpus_node_are_read(tmp_path: Path) -> None:
    assert cores_near(GPU, recorded(tmp_path, "1\n")) == {*range(16), *range(32, 48)}


@pytest.mark.parametrize(
    ("node", "cpulist"), [("-1\n", "0-3\n"), ("", "0-3\n"), ("0\n", "0-3\n"), ("1\n", "\n"), ("1\n", "damaged\n")]
)
def test_a_node_that_the_kernel_does_not_know_has_no_cores(tmp_path: Path, node: str, cpulist: str) -> None:
    assert cores_near(GPU, recorded(tmp_path, node, cpulist)) == set()
    assert cores_near("0000:99:00.0", tmp_path) == set()


@pytest.mark.parametrize(
    ("allowed", "near", "threads", "expected"),
    [
        (set(range(64)), set(range(32)), 8, set(range(32))),
        ({1, 2, 40}, set(range(32)), 1, {1, 2}),  # what the user has chosen is never widened
        ({40, 41}, set(range(32)), 1, {40, 41}),  # nor left
        (set(range(64)), set(), 1, set(range(64))),
        (set(range(64)), set(range(32)), 64, set(range(64))),  # threads for the whole machine
        (set(range(64)), set(range(32)), 32, set(range(32))),
    ],
)
def test_cores_are_chosen_of_those_that_are_allowed(
    allowed: set[int], near: set[int], threads: int, expected: set[int]
) -> None:
    assert chosen(allowed, near, threads) == expected


def test_a_worker_and_its_threads_stay_on_the_cores_of_the_node(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    core, found = min(before), []
    root = recorded(tmp_path, "1\n", f"{core}\n")
    try:
        bind(GPU, 2, root)
        assert os.sched_getaffinity(0) == before  # two threads have not room enough
        bind(GPU, 1, root)
        thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        assert [*found, os.sched_getaffinity(0)] == [{core}, {core}]
    finally:
        os.sched_setaffinity(0, before)
