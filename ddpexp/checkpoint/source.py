"""Reading tensors by name from one safetensors file or several, one at a time or only some rows of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ddpexp.checkpoint.headers import Entry, read_source
from ddpexp.checkpoint.tensors import StoredTensor, open_tensors


class Source:
    """The tensors of files; values are read from the disk only when they are asked for."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        """Take the names, shapes and places of the tensors, as `ddpexp.checkpoint.headers` returns them."""
        self.entries = entries
        self._files: dict[Path, Mapping[str, StoredTensor]] = {}

    @classmethod
    def of(cls, path: Path) -> Source:
        """Open a file, an index of several, or a folder with either. Raises RefusedError: it is damaged."""
        return cls(read_source(path))

    def read(self, name: str, first_row: int | None = None, num_rows: int = 0) -> Tensor:
        """Return a tensor on the CPU or, with `first_row`, some of its rows alone.

        Raises:
            RefusedError: the file cannot be read.
        """
        return self._read(self.entries[name], first_row, num_rows)

    def _read(self, entry: Entry, first_row: int | None, num_rows: int) -> Tensor:
        if entry.file not in self._files:
            self._files[entry.file] = open_tensors(entry.file)
        stored = self._files[entry.file][entry.stored_as]
        return stored.read() if first_row is None else stored.read(first_row, num_rows)
