"""The files that arrays and tables are read from. Standard library only, and fast to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ddpexp.data.named_files import Source

ARRAYS, TABLES = (".npy", ".npz"), (".csv", ".parquet")

Names = tuple[str, ...]
Classes = tuple[str | int, ...]
TargetType = Literal["auto", "class", "number", "none"]
ColumnKind = Literal["number", "category", "date", "text", "drop"]


@dataclass(frozen=True)
class SplitFiles:
    """The files of a split of the data, and what is read from them."""

    name: str  # train or eval
    source: Source
    inputs: Names | None  # columns, or one array of an `.npz` file; None: all but the targets
    targets: Names | None  # likewise; None: there are none, or they are in `labels`
    labels: Source | None  # the file with the targets of an `.npy` file

    @property
    def key(self) -> str:
        """Return the beginning of the keys of this split."""
        return self.source.key.removesuffix("path")


@dataclass(frozen=True)
class ColumnOptions:
    """What the options of the data section declare of columns, beside their names."""

    target_type: str = "auto"
    classes: Names | None = None
    dtype: str = "float32"
    group_by: str | None = None
    columns: Mapping[str, ColumnKind] = field(default_factory=dict)
    missing: Mapping[str, str | float] = field(default_factory=dict)
    delimiter: str | None = None

    def identity(self) -> dict[str, Any]:
        """Return the options by which a cache is found again, as JSON."""
        return {**vars(self), "columns": dict(self.columns), "missing": dict(self.missing)}

    @property
    def dropped(self) -> Names:
        """Return the columns that are no inputs."""
        return tuple(name for name, kind in self.columns.items() if kind == "drop")
