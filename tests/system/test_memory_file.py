"""Values of any size for another process, and no descriptor that is left open."""

from __future__ import annotations

import os
import subprocess

import pytest

from ddpexp.system.memory_file import memory_file, read_memory_file
from ddpexp.system.programs import python
from tests.conftest import PATIENCE


@pytest.mark.parametrize(
    "value", [{"names": ["é", None, 1.5]}, ["x" * (3 << 20)], None], ids=["small", "large", "none"]
)
def test_another_process_reads_the_value(value: object) -> None:
    open_before = os.listdir("/proc/self/fd")
    with memory_file(value) as descriptor:
        assert not os.get_inheritable(descriptor)  # only a process that it is passed to has it
        assert read_memory_file(os.dup(descriptor)) == value
        os.lseek(descriptor, 0, os.SEEK_SET)
        command = python("tests.system.test_memory_file:printed", descriptor)
        done = subprocess.run(command, pass_fds=[descriptor], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.stdout, done.stderr) == (f"{len(repr(value))} True\n", "")
    assert len(os.listdir("/proc/self/fd")) == len(open_before)


def printed(descriptor: int) -> None:
    """Print the length of a value as Python writes it, and whether the descriptor is closed."""
    length = len(repr(read_memory_file(descriptor)))
    print(length, str(descriptor) not in os.listdir("/proc/self/fd"))
