"""Reading safetensors files: all tensors of one, or rows of some."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddpexp.checkpoint.codec import DTYPES
from ddpexp.checkpoint.headers import Entry, read_header
from ddpexp.errors import RefusedError

_BUFFER_BYTES = 16 << 20  # for what cannot be read into its place
_READ_BYTES = 1 << 30  # in one call: the kernel reads at most two gigabytes


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, which is not read yet."""

    path: Path
    offset: int  # of its first byte in the file
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, first_row: int = 0, num_rows: int | None = None) -> Tensor:
        """Read rows, by default all, into new memory of the CPU. Raises RefusedError, as `read_into`."""
        out = torch.empty(self.shape if num_rows is None else (num_rows, *self.shape[1:]), dtype=self.dtype)
        self.read_into(out, first_row)
        return out

    @torch.no_grad()
    def read_into(self, out: Tensor, first_row: int = 0) -> None:
        """Read as many rows as `out` has, which may be of any device, dtype and strides.

        Raises:
            RefusedError: the file cannot be read, or is shorter than it was.
        """
        out = out.detach()
        if not out.numel():
            return
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        begin = self.offset + first_row * row_bytes
        if out.device.type == "cpu" and out.dtype == self.dtype and out.is_contiguous():
            self._read_bytes(begin, out)
            return
        rows = out.view(1) if out.dim() == 0 else out
        buffer = torch.empty((min(len(rows), max(1, _BUFFER_BYTES // row_bytes)), *self.shape[1:]), dtype=self.dtype)
        for part in torch.split(rows, len(buffer)):
            read = buffer[: len(part)]
            self._read_bytes(begin, read)
            part.copy_(read)
            begin += len(part) * row_bytes

    def _read_bytes(self, offset: int, out: Tensor) -> None:
        """Read bytes into a contiguous tensor on the CPU."""
        array: Any = out.reshape(-1).view(torch.uint8).numpy()
        rest = memoryview(array)
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, offset, len(rest), os.POSIX_FADV_SEQUENTIAL)  # reads ahead twice as far
                while rest:
                    num_bytes = os.preadv(descriptor, [rest[:_READ_BYTES]], offset)
                    if not num_bytes:
                        raise OSError("it ends too early")
                    rest, offset = rest[num_bytes:], offset + num_bytes
            finally:
                os.close(descriptor)
        except OSError as error:
            raise RefusedError(f"cannot be read: {error.strerror or error}", place=self.path) from None


def open_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, of which only the header is read; tied ones under all their names.

    Raises:
        RefusedError: it cannot be read as one.
    """
    entries = read_header(path)  # not the safetensors library: it maps the whole file, as memory that may be written to
    tensors = {}
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            raise RefusedError(f"cannot be read: it holds tensors of the type {entry.dtype}", place=path)
        dtype = DTYPES[entry.dtype]
        if entry.end - entry.begin != entry.num_elements * dtype.itemsize:
            raise RefusedError(
                f"cannot be read as safetensors ({name} does not have the size of its shape)", place=path
            )
        tensors[name] = StoredTensor(path, entry.begin, dtype, entry.shape)
    _check_places(path, entries.values())
    return tensors


def _check_places(path: Path, entries: Collection[Entry]) -> None:
    """Check that the tensors of a file lie one after the other, up to its end.

    Raises:
        RefusedError: they do not.
    """
    stored = sorted({(entry.begin, entry.end) for entry in entries if entry.begin != entry.end})
    ends = [end for _, end in stored]
    if [begin for begin, _ in stored[1:]] != ends[:-1] or (ends and ends[-1] != path.stat().st_size):
        raise RefusedError("cannot be read as safetensors (its tensors do not fill the file)", place=path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; tied tensors appear under each of their names.

    Raises:
        RefusedError: it cannot be read as one.
    """
    from safetensors import SafetensorError, safe_open

    try:
        check_plain_file(path)
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            tied = _ties(file.metadata() or {}, tensors)
    except (OSError, SafetensorError, ValueError) as error:
        raise RefusedError(f"cannot be read as safetensors ({error})", place=path) from None
    return {**tensors, **{name: tensors[first] for name, first in tied.items()}}


def _ties(metadata: Mapping[str, str], tensors: Mapping[str, Any]) -> dict[str, str]:
    """Map each further name of a tied tensor to the one under which the file holds it."""
    return {name: first for name, first in metadata.items() if first in tensors and name not in tensors}


def check_plain_file(path: Path) -> None:
    """Raise OSError if a path exists and is not a plain file: reading from a pipe would block."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path.name} is not a plain file")
