"""metrics.jsonl: one JSON object a line, for programs."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

from ddpexp.track import Null


class JsonLines(Null):
    """Append scalars as lines of JSON; everything else is not for this file."""

    def __init__(self, path: Path) -> None:
        """Open the file; each line reaches it whole."""
        self._file = path.open("a", buffering=1)

    def scalars(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Write one line; numbers that are not finite become null, for JSON has none."""
        record = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, "epoch": round(epoch, 4), "time": time.time(), **record}) + "\n")

    def flush(self) -> None:
        """Bring the lines to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        self._file.close()
