"""Tables for spreadsheets and data frames: scalars as comma-separated values, a file for each kind of record."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpexp.loggers.append_file import AppendFile, length_in, truncate_file
from ddpexp.loggers.base import Logger

_FOLDER = "csv"


class CsvFiles(Logger):
    """Write a row for each record: training to train.csv, each evaluation set to a file of its name.

    The first record of a file decides its columns; one with other names, as after a change on resume, begins another
    file: train-2.csv.
    """

    def __init__(self, run_dir: Path) -> None:
        """Create the folder; its files are created with their first record."""
        self._folder = run_dir / _FOLDER
        self._folder.mkdir(exist_ok=True)
        self._files: dict[str, AppendFile] = {}  # open ones, by their names without .csv
        self._names: dict[str, Sequence[str]] = {}  # the names in their columns

    def scalars(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Write a row to each file that the names belong to."""
        kinds: dict[str, dict[str, float]] = {}
        for name, value in values.items():
            kinds.setdefault(name.partition("/")[0], {})[name] = value
        for kind, columns in kinds.items():
            key = self._key(kind or "_", list(columns))
            self._files[key].write(_line([step, f"{epoch:.4f}", *(columns[name] for name in self._names[key])]))

    def position(self) -> dict[str, int]:
        """Return the lengths of the files, those of earlier starts too. Units: bytes."""
        for file in self._files.values():
            file.flush()
        return {f"{_FOLDER}/{path.name}": path.stat().st_size for path in self._folder.glob("*.csv")}

    def truncate(self, position: Mapping[str, Any] | None, step: int) -> None:
        """Cut the files back to their lengths at the checkpoint; remove those that it did not have."""
        for path in self._folder.glob("*.csv"):
            name = f"{_FOLDER}/{path.name}"
            truncate_file(path, position, name, lines=True)
            if not length_in(position, name):
                path.unlink()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _key(self, kind: str, names: Sequence[str]) -> str:
        """Return which file has these columns; it is opened."""
        number = 1
        while True:
            key = kind if number == 1 else f"{kind}-{number}"
            if key not in self._names:
                self._open(key, names)
            if sorted(self._names[key]) == sorted(names):
                return key
            number += 1

    def _open(self, key: str, names: Sequence[str]) -> None:
        """Open a file that an earlier start has begun, or begin it with these names."""
        path = self._folder / f"{key}.csv"
        header = b""
        if path.is_file():
            with path.open("rb") as lines:
                header = lines.readline()
        self._files[key] = file = AppendFile(path)
        if header:
            self._names[key] = next(csv.reader([header.decode()]))[2:]
        else:
            self._names[key] = names
            file.write(_line(["step", "epoch", *names]))


def _line(cells: Sequence[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
