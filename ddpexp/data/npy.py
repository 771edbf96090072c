"""Writing new files, and reading and writing `.npy` files without numpy.

Standard library only, and fast to import: the launching command imports this module.
"""

from __future__ import annotations

import ast
import os
import struct
from pathlib import Path
from typing import BinaryIO

_LONGEST_HEADER = 1 << 16  # bytes


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


def read_npy_header(file: BinaryIO) -> tuple[str, tuple[int, ...], int]:
    """Return format and shape of the numbers in an `.npy` file, and where they begin, which is read next.

    Source: NumPy Enhancement Proposal 1.

    Raises:
        ValueError, KeyError, TypeError, SyntaxError, struct.error: it is no such file in C order.
    """
    magic, major, _ = struct.unpack("<6sBB", file.read(8))
    if magic != b"\x93NUMPY":
        raise ValueError
    [length] = struct.unpack("<H", file.read(2)) if major == 1 else struct.unpack("<I", file.read(4))
    begin = file.tell() + length
    if length > _LONGEST_HEADER:
        raise ValueError
    header = ast.literal_eval(file.read(length).decode("latin1"))
    shape = header["shape"]
    if header["fortran_order"] or not all(isinstance(one, int) and one >= 0 for one in shape):
        raise ValueError
    return header["descr"], shape, begin
