"""metrics.jsonl: one JSON object per line, for programs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpexp.loggers.append_file import AppendFile, truncate_file
from ddpexp.loggers.base import Logger
from ddpexp.system.files import Anchor


class JsonLines(Logger):
    """Append scalars as lines of JSON; ignore everything else."""

    def __init__(self, path: Path) -> None:
        """Open the file, in a run directory; lines are written atomically."""
        self._anchor = Anchor(path.parent)
        self._file = AppendFile(path)

    def scalars(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Write one line; non-finite numbers become null, since JSON has none, and names are written as they are.

        Raises:
            MovedError: the run directory was moved.
        """
        self._anchor.check()
        record = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps({"step": step, "epoch": round(epoch, 4), "time": time.time(), **record})
        self._file.write(line.encode() + b"\n")

    def position(self) -> dict[str, int]:
        """Return the length of the file. Units: bytes."""
        self._file.flush()
        return {self._file.path.name: self._file.num_bytes}

    def truncate(self, position: Mapping[str, Any] | None, step: int) -> None:
        """Cut the file back to its length at the checkpoint, and to whole lines."""
        truncate_file(self._file.path, position, self._file.path.name, lines=True)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
