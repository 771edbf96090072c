"""Reading tensors by name from safetensors files, one at a time or only some rows of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ddpexp.checkpoint.headers import Entry, read_source
from ddpexp.errors import RefusedError


class Source:
    """The tensors of one safetensors file or of several; values are read from the disk only when they are asked for.

    Use it as a context manager: the files stay open inside the block.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        """Take the names, shapes and places of the tensors, as `ddpexp.checkpoint.headers` returns them."""
        self.entries = entries
        self._files: dict[Path, Any] = {}
        self._open = ExitStack()

    @classmethod
    def of(cls, path: Path) -> Source:
        """Open a file, an index of several, or a folder with either. Raises RefusedError: it is damaged."""
        return cls(read_source(path))

    def __enter__(self) -> Source:
        """Return the source."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        self._files.clear()
        self._open.close()

    def read(self, name: str, first_row: int | None = None, num_rows: int = 0) -> Tensor:
        """Return a tensor on the CPU or, with `first_row`, some of its rows alone.

        Raises:
            RefusedError: the file cannot be read.
        """
        return self._read(self.entries[name], first_row, num_rows)

    def _read(self, entry: Entry, first_row: int | None, num_rows: int) -> Tensor:
        try:
            file = self._file(entry.file)
            if first_row is None:
                tensor: Tensor = file.get_tensor(entry.stored_as)
            else:
                tensor = file.get_slice(entry.stored_as)[first_row : first_row + num_rows]
        except (OSError, SafetensorError, ValueError) as error:
            raise RefusedError(f"{entry.file.name} cannot be read as safetensors ({error}).") from None
        return tensor

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = self._open.enter_context(safe_open(str(path), framework="pt"))
        return self._files[path]
