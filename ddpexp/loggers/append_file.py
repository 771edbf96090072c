"""A file that grows by whole records, and keeps in memory what a full or broken disk does not take."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ddpexp.system.limits import said_with_limit

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW  # a link may lead anywhere


class Appending:
    """Append to a file. What cannot be written now is tried again with the next record.

    Training does not end for it.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, or leave that for later where it cannot be."""
        self.path = path
        self._descriptor: int | None = None
        self._waiting = b""
        self._warned = False
        self.flush()

    def write(self, record: bytes) -> None:
        """Append a record, whole or (for now) not at all."""
        self._waiting += record
        self.flush()

    def flush(self) -> None:
        """Try to bring everything to the file."""
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, _FLAGS, 0o644)
            if self._waiting:
                self._append(self._descriptor)
        except OSError as error:
            if not self._warned:
                self._warned = True
                text = "%s cannot be written (%s): its records wait in memory and are written when that ends"
                logging.getLogger("ddpexp").warning(text, self.path.name, said_with_limit(error, self.path))

    def _append(self, descriptor: int) -> None:
        done = 0
        try:
            while done < len(self._waiting):
                done += os.write(descriptor, self._waiting[done:])
        except OSError:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - done)  # no half of a record stays
            raise
        self._waiting = b""
        self._warned = False

    @property
    def num_bytes(self) -> int:
        """Return how long the file is now."""
        return 0 if self._descriptor is None else os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Try once more, and close."""
        self.flush()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
