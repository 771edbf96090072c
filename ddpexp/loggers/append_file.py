"""A file that grows by whole records, and buffers them in memory while the disk is full or failing.

A function truncates such a file to the length that a checkpoint recorded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpexp.system.files import whole_lines
from ddpexp.system.limits import reason_with_limit

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW  # a link may lead anywhere


class AppendFile:
    """Append records to a file; what cannot be written is retried with the next record, so that training continues."""

    def __init__(self, path: Path) -> None:
        """Open the file; if that fails, it is retried with each record."""
        self.path = path
        self._descriptor: int | None = None
        self._pending = b""
        self._warned = False
        self.flush()

    def write(self, record: bytes) -> None:
        """Append a record, atomically; it is kept in memory if that fails."""
        self._pending += record
        self.flush()

    def flush(self) -> None:
        """Try to write everything that is pending."""
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, _FLAGS, 0o644)
            if self._pending:
                self._append(self._descriptor)
        except OSError as error:
            if not self._warned:
                self._warned = True
                text = "%s cannot be written (%s): its records wait in memory and are written when that ends"
                logging.getLogger("ddpexp").warning(text, self.path.name, reason_with_limit(error, self.path))

    def _append(self, descriptor: int) -> None:
        written = 0
        try:
            while written < len(self._pending):
                written += os.write(descriptor, self._pending[written:])
        except OSError:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)  # leave no partial record
            raise
        self._pending = b""
        self._warned = False

    @property
    def num_bytes(self) -> int:
        """Return the current size of the file."""
        return 0 if self._descriptor is None else os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Try once more to write pending records, and close the file."""
        self.flush()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def truncate_file(path: Path, position: Mapping[str, Any] | None, name: str, *, lines: bool = False) -> None:
    """Cut a file back to the length that a checkpoint recorded under `name`; to nothing if it recorded none.

    A file that is shorter than that keeps its contents, with a warning; one of `lines` loses a partial last line.

    Raises OSError.
    """
    if not path.is_file():
        return
    num_bytes = length_in(position, name)
    size = path.stat().st_size
    if size < num_bytes:
        text = "%s is shorter than at the checkpoint: some of its records are lost"
        logging.getLogger("ddpexp").warning(text, path.name)
        num_bytes = whole_lines(path) if lines else size
    if num_bytes < size:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, num_bytes)
        finally:
            os.close(descriptor)


def length_in(position: Mapping[str, Any] | None, name: str) -> int:
    """Return the length of a file that a checkpoint recorded, 0 if it recorded none. Units: bytes."""
    length = (position or {}).get(name, 0)
    return length if isinstance(length, int) else 0
