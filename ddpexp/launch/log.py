"""The output of one worker: a file that the worker writes and the watcher reads."""

from __future__ import annotations

import codecs
import math
import os
import tempfile
from pathlib import Path
from typing import IO

_BLOCK = 1 << 16


class Log:
    """A file, not a pipe: a stopped terminal never stops a worker, and what a dying one wrote is there."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        """Make `<folder>/<rank>.log`, or without a folder a file that has no name and is gone with its last reader."""
        if folder is None:
            self._file: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"{rank}.log").open("a+b", buffering=0)  # an attempt before this one may have written
        self._begin()

    @classmethod
    def reading(cls, path: Path) -> Log:
        """Follow a file that somebody else writes."""
        log = cls.__new__(cls)
        log._file = path.open("rb", buffering=0)
        log._begin()
        log._read = 0
        return log

    def _begin(self) -> None:
        self._read = self.size()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def fileno(self) -> int:
        """Return the descriptor to write to; both ends append."""
        return self._file.fileno()

    def size(self) -> int:
        """Return the number of bytes written so far."""
        return os.fstat(self.fileno()).st_size

    def new_lines(self, last: bool = False, until: float = math.inf) -> list[str]:
        """Return the lines written since the last call, in the first `until` bytes; with `last` also one that has no end."""
        text = self._rest
        while block := os.pread(self.fileno(), int(min(_BLOCK, max(0, until - self._read))), self._read):
            self._read += len(block)
            text += self._decoder.decode(block)
        *lines, self._rest = text.split("\n")
        if last and self._rest:
            lines.append(self._rest)
        return [line.removesuffix("\r") for line in lines]

    def last_lines(self, count: int) -> str:
        """Return the end of what was written."""
        begin = max(0, self.size() - _BLOCK)
        return "\n".join(os.pread(self.fileno(), _BLOCK, begin).decode(errors="replace").splitlines()[-count:])

    def add(self, text: str) -> None:
        """Append what the watcher knows of the worker's end."""
        self._file.write(text.encode())

    def close(self) -> None:
        """Close the watcher's end."""
        self._file.close()
