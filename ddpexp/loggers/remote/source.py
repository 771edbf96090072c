"""Reading the records of a run while they are written, as one row for each step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddpexp.loggers.remote import media
from ddpexp.loggers.remote.base import Medium, Row
from ddpexp.system.secrets import masked_tree

METRICS = "metrics.jsonl"
_NO_VALUES = ("step", "epoch", "time")


class Records:
    """The rows of a run directory, each returned once."""

    def __init__(self, run_dir: Path) -> None:
        """Start with the first record."""
        self._run_dir = run_dir
        self.rewind()

    def rewind(self) -> None:
        """Start again with the first record."""
        self._metrics, self._media = _Lines(self._run_dir / METRICS), _Lines(self._run_dir / media.NAME)
        self._rows: dict[int, _Parts] = {}

    def take(self, final: bool) -> list[Row]:
        """Return the rows that are complete: those before the newest step or, if nothing follows, all of them."""
        newest = -1
        for record in self._metrics.read():  # before the media, which are written before the next step's metrics
            newest = int(record["step"])
            parts = self._parts(record)
            parts.epoch, parts.time = record["epoch"], record["time"]
            parts.scalars |= {
                name: math.nan if value is None else value for name, value in record.items() if name not in _NO_VALUES
            }
        for record in self._media.read():
            self._parts(record).media.append(media.medium_of(record))
        newest = max(newest, max((step for step, parts in self._rows.items() if parts.scalars), default=-1))
        steps = sorted(step for step in self._rows if final or step < newest)
        return [self._rows.pop(step).row() for step in steps]

    def _parts(self, record: dict[str, Any]) -> _Parts:
        return self._rows.setdefault(int(record["step"]), _Parts(int(record["step"]), record["time"]))


class _Parts:
    """What was recorded at a step so far."""

    def __init__(self, step: int, time: float) -> None:
        self.step = step
        self.time = time
        self.epoch = math.nan
        self.scalars: dict[str, float] = {}
        self.media: list[Medium] = []

    def row(self) -> Row:
        return Row(self.step, self.epoch, self.time, self.scalars, tuple(self.media))


class _Lines:
    """The complete lines of a growing file, each read once."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> Iterator[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError(f"{self._path.name} holds a line that is not a record")
            yield masked_tree(record)  # a text may have become a secret since it was written
