"""What predictions are called: the rows by their files or ids, classes and numbers by the names that the data has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpexp.data.base import SampleNames
from ddpexp.system.secrets import masked_tree

Arrays = Mapping[str, NDArray[Any]]

_OF_A_CLASS = ("label", "class", "prediction", "predicted")  # arrays with the number of a class for each sample
_OF_CLASSES = ("probability", "probabilities", "prob", "probs", "score", "scores", "logit", "logits")
_OF_TARGETS = ("value", "values", "prediction", "predicted")
_SHOWN = 3  # classes of a sample, the likeliest ones
_LISTED = 8  # numbers of a sample


@dataclass(frozen=True)
class Predictions:
    """What a task predicted, with the names of its rows, classes and targets.

    Shapes: every array (samples, ...).
    """

    arrays: Arrays
    samples: SampleNames | None  # None: by their indices
    classes: Sequence[str] | None = None
    targets: Sequence[str] | None = None

    def masked(self) -> Predictions:
        """Return them with the secrets in names replaced."""
        samples = self.samples
        return Predictions(
            {masked_tree(name): array for name, array in self.arrays.items()},
            samples and SampleNames(masked_tree(samples.column), masked_tree(list(samples.values))),
            self.classes and masked_tree(list(self.classes)),
            self.targets and masked_tree(list(self.targets)),
        )

    @property
    def rows(self) -> SampleNames:
        """Return what the rows are called, by their indices if there is nothing else."""
        return self.samples or SampleNames("index", range(len(next(iter(self.arrays.values())))))

    def named(self) -> dict[str, NDArray[Any]]:
        """Return the arrays; behind the numbers of classes stands an array with their names."""
        found: dict[str, NDArray[Any]] = {}
        for name, array in self.arrays.items():
            found[name] = array
            if self.classes and name in _OF_A_CLASS and _are_places(array, len(self.classes)):
                column = f"{name}_name" if {"class"} & {*self.arrays, *found} else "class"
                found[column] = np.asarray(self.classes, str)[array]
        return found

    def columns_of(self, name: str) -> Sequence[str] | None:
        """Return what the numbers of a row of an array are called; None if nothing says so."""
        array = self.arrays.get(name)
        for names, kinds in ((self.classes, _OF_CLASSES), (self.targets, _OF_TARGETS)):
            if names and array is not None and name in kinds and array.shape[1:] == (len(names),):
                return names
        return None

    def records(self) -> list[dict[str, Any]]:
        """Return a mapping for each sample: its name, numbers, texts, numbers by their names, and arrays."""
        columns: dict[str, Sequence[Any]] = {}
        for name, array in self.named().items():
            if array.ndim == 1:
                columns[name] = array.tolist()
            elif (names := self.columns_of(name)) is not None:
                columns[name] = [dict(zip(names, row, strict=True)) for row in array.tolist()]
            else:
                columns[name] = list(array)
        rows = self.rows
        columns = columns if rows.column in columns else {rows.column: rows.values, **columns}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record as JSON has it, in which a number that is not finite is null."""
    return {name: _plain(value) for name, value in record.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def printed(records: Sequence[Mapping[str, Any]]) -> str:
    """Return records as lines for people, the columns below one another."""
    lines = [[str(name) for name in records[0]], *([_printed(value) for value in row.values()] for row in records)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _printed(value: Any) -> str:
    if isinstance(value, Mapping):
        likeliest = sorted(value.items(), key=lambda pair: -(pair[1] if pair[1] is not None else -np.inf))
        more = ", ..." if len(value) > _SHOWN else ""
        return ", ".join(f"{name} {_printed(number)}" for name, number in likeliest[:_SHOWN]) + more
    if isinstance(value, list):
        if len(value) > _LISTED or any(isinstance(one, list) for one in value):
            return f"{' x '.join(map(str, np.shape(value)))} numbers: --out FILE.npz"
        return ", ".join(map(_printed, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _are_places(array: NDArray[Any], count: int) -> bool:
    return array.ndim == 1 and array.dtype.kind in "iu" and bool(((array >= 0) & (array < count)).all())
