"""Writing new files, and `.npy` files without numpy.

Standard library only, and fast to import: the launching command imports this module.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path


def write_file(path: Path, *parts: bytes | memoryview) -> None:
    """Write a new file and flush it to the disk. Raises: OSError."""
    with open(path, "xb") as stream:
        stream.writelines(parts)
        stream.flush()
        os.fsync(stream.fileno())


def write_npy(path: Path, shape: tuple[int, ...], content: bytes | memoryview, descr: str = "|u1") -> None:
    """Write a new `.npy` file in C order, of bytes or of numbers in the format `descr`. Raises: OSError."""
    write_file(path, npy_header(shape, descr), content)


def npy_header(shape: tuple[int, ...], descr: str = "|u1") -> bytes:
    """Make the header of an `.npy` file in C order, of bytes or of numbers in another format.

    Source: NumPy Enhancement Proposal 1, format version 1.0; data begins at a multiple of 64.
    """
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    length = -(10 + len(text) + 1) % 64 + len(text) + 1
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", length) + text.ljust(length - 1).encode() + b"\n"
