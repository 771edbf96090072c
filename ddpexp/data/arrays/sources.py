"""The files that arrays and tables are read from. Standard library only, and fast to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ARRAYS, TABLES = (".npy", ".npz"), (".csv", ".parquet")
GROUP_FILES = (".npy", ".txt", ".csv")  # in which data.group_by may lie

Names = tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """A file that is read, and by which its cache is found again."""

    key: str  # the override that names it
    path: str
    size: int
    modified: int  # nanoseconds

    @property
    def kind(self) -> str:
        """Return the ending of its name."""
        return Path(self.path).suffix.lower()

    def __str__(self) -> str:
        """Return the key and the path, for messages."""
        return f"{self.key}={self.path}"


@dataclass(frozen=True)
class Part:
    """The files of a part of the data, and what is read from them."""

    name: str  # train or eval
    source: Source
    inputs: Names | None  # columns, or one array of an `.npz` file; None: all but the targets
    targets: Names | None  # likewise; None: there are none, or they are in `labels`
    labels: Source | None  # the file with the targets of an `.npy` file

    @property
    def key(self) -> str:
        """Return the beginning of the keys of this part."""
        return self.source.key.removesuffix("path")
