"""Values of any size for another process: JSON in a file without a name, in memory, whose descriptor it gets.

Linux limits an argument of a program to 128 KiB, and a packet of a Unix socket to `net.core.wmem_default` (208 KiB).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def memory_file(value: Any) -> Iterator[int]:
    """Yield a descriptor from which one other process can read a value, and close it at the end. Raises: OSError."""
    descriptor = os.memfd_create("ddpexp")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(json.dumps(value).encode())
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def read_memory_file(descriptor: int) -> Any:
    """Return the value, and close the descriptor."""
    with open(descriptor, "rb") as file:
        return json.load(file)
