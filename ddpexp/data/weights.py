"""Which samples an epoch draws: with replacement by weights, or an epoch longer or shorter than the data."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpexp.data.arrays.texts import NUMBER
from ddpexp.data.order import STRIDE, Order, Permutation, mix, permutation, piecewise, uniforms
from ddpexp.errors import RefusedError
from ddpexp.system.files import open_regular, read_regular_text
from ddpexp.system.text import is_number


@dataclass(frozen=True)
class Weighted:
    """Draw samples with replacement, each in proportion to its weight, as evenly as an epoch allows.

    An epoch of n draws cuts the total weight into n equal stretches and draws one sample from each: the stretches in
    the order of a permutation, and the place within each from a hash of seed, epoch and stretch. So any run of samples
    in the table is drawn as often as its share says, to less than two draws, where independent draws would miss by the
    square root of their number; and the draw at a position costs O(log(number of samples)).

    Shapes: sequence (num_samples,), the samples in the order of the table; weights (num_samples,), in that order.
    """

    samples_per_epoch: int
    sequence: NDArray[np.int64]
    weights: NDArray[np.float64]

    @classmethod
    def of(cls, weights: NDArray[np.float64], samples_per_epoch: int, classes: NDArray[Any] | None = None) -> Weighted:
        """Lay out the table: samples of a class side by side, so that its share is met, and else shuffled."""
        shuffled = Permutation(len(weights), seed=0, epoch=2)(np.arange(len(weights)))
        if classes is not None:
            shuffled = shuffled[np.argsort(classes[shuffled], kind="stable")]
        return cls(samples_per_epoch, shuffled, weights[shuffled])

    def order(self, seed: int, epoch: int) -> Order:
        """Return the draws of one epoch."""
        return _Draws(self, Permutation(self.samples_per_epoch, seed, epoch))

    @cached_property
    def ends(self) -> NDArray[np.float64]:
        """Return where the stretch of each sample ends. Units: draws of an epoch."""
        sums = np.cumsum(self.weights)  # one by one: the same bits everywhere
        ends: NDArray[np.float64] = sums * (self.samples_per_epoch / sums[-1])
        ends[np.flatnonzero(self.weights)[-1] :] = np.inf  # rounding leaves no draw without a sample
        return ends

    @cached_property
    def digest(self) -> str:
        """Return a hash of what is drawn."""
        parts = np.array([self.samples_per_epoch]), self.sequence, self.weights
        return hashlib.sha256(
            b"".join(part.astype(part.dtype.newbyteorder("<")).tobytes() for part in parts)
        ).hexdigest()


@dataclass(frozen=True)
class _Draws:
    """The draws of one epoch."""

    table: Weighted
    stretches: Permutation

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        stretch = self.stretches(positions)
        within = uniforms(mix(self._key + stretch.astype(np.uint64) * STRIDE))
        # The stretches begin elsewhere in each epoch, so that no two samples always share one.
        at = stretch + within + self._shift
        at -= np.where(at >= self.table.samples_per_epoch, self.table.samples_per_epoch, 0)
        found: NDArray[np.int64] = self.table.sequence[np.searchsorted(self.table.ends, at, side="right")]
        return found

    @cached_property
    def _key(self) -> np.uint64:
        key = np.frombuffer(b"ddpdraws", dtype="<u8").astype(np.uint64)
        for part in (self.stretches.length, self.stretches.seed, self.stretches.epoch):
            key = mix((key ^ np.uint64(part % 2**64)) + STRIDE)
        word: np.uint64 = key[0]
        return word

    @cached_property
    def _shift(self) -> float:
        return float(uniforms(mix(np.array([self._key ^ STRIDE], np.uint64)))[0])


@dataclass(frozen=True)
class Passes:
    """Epochs of another length than the data: one pass over all samples after the other, cut into epochs."""

    samples_per_epoch: int
    num_samples: int

    def order(self, seed: int, epoch: int) -> Order:
        """Return the stretch of one epoch."""
        first, length = epoch * self.samples_per_epoch, self.num_samples
        return lambda positions: piecewise(positions + first, length, lambda number: permutation(length, seed, number))


def class_balanced(classes: NDArray[Any]) -> NDArray[np.float64]:
    """Return weights by which every class is drawn equally often."""
    _, number, counts = np.unique(classes, return_inverse=True, return_counts=True)
    weights: NDArray[np.float64] = 1.0 / counts[number]
    return weights


def read_values(path: str, key: str) -> NDArray[Any]:
    """Read a value for each sample: an array of an `.npy` file, or a line for each in `.txt` or `.csv`.

    The first line of a `.csv` file may be a header. `key` is the configuration key that names the file.

    Raises:
        RefusedError: the file cannot be read.
    """
    file = Path(os.path.expanduser(path))
    try:
        if file.suffix == ".npy":
            with open_regular(file) as opened:
                values: NDArray[Any] = np.load(opened, allow_pickle=False)
        else:
            text = read_regular_text(file).removeprefix("\ufeff")
            lines = [line.strip().strip('"') for line in text.splitlines() if line.strip()]
            values = np.array(lines[1:] if file.suffix == ".csv" and lines and not is_number(lines[0]) else lines)
    except OSError as error:
        raise RefusedError(f"cannot be read: {error.strerror or error}", key=key, value=path) from None
    except (ValueError, EOFError) as error:
        raise RefusedError(f"is not an array of numbers stored by numpy.save ({error})", key=key, value=path) from None
    if values.ndim != 1:
        raise RefusedError(
            f"holds an array of shape {values.shape}",
            key=key,
            value=path,
            suggestion="Store one value for each sample.",
        )
    return values


def as_numbers(values: Any, key: str) -> NDArray[np.float64]:
    """Return values as numbers; `key` is the override that gives them.

    Raises:
        RefusedError: they are not numbers, or texts other than decimal numbers.
    """
    try:
        if (array := np.asarray(values)).dtype.kind == "U":
            wrong = next((place for place, text in enumerate(array.flat) if not NUMBER.fullmatch(text)), None)
            if wrong is not None:
                raise ValueError(f"the value of sample {wrong} is {str(array.flat[wrong])!r}")
        return array.astype(np.float64)
    except (ValueError, TypeError) as error:
        raise RefusedError(f"holds something other than numbers: {error}", key=key) from None


def checked_amounts(values: Any, num_samples: int | None, name: str, key: str) -> NDArray[np.float64]:
    """Return the amounts called `name` as numbers; `key` is the override that gives them.

    None as number of samples: it is not known yet.

    Raises:
        RefusedError: they are negative, not finite, or not one for each sample.
    """
    amounts = as_numbers(values, key)
    _check_count(amounts, num_samples, f"{name}s", key)
    wrong = np.flatnonzero(~(amounts >= 0) | np.isinf(amounts))
    if wrong.size:
        raise RefusedError(
            f"The {name} of sample {wrong[0]} is {amounts[wrong[0]]:g}", key=key, suggestion="Use 0 or more."
        )
    return amounts


def checked_weights(values: Any, num_samples: int | None, key: str) -> NDArray[np.float64]:
    """Return weights as `checked_amounts`; not all may be zero. Raises: RefusedError."""
    weights = checked_amounts(values, num_samples, "weight", key)
    if not weights.any():
        raise RefusedError(
            "All weights are 0, so there is nothing to draw", key=key, suggestion="Give some samples a weight above 0."
        )
    return weights


def checked_groups(values: NDArray[Any], num_samples: int | None, name: str) -> NDArray[Any]:
    """Return the groups that `data.group_by` names. Raises: RefusedError, if they are not one for each sample."""
    _check_count(values, num_samples, "values", f"data.group_by={name}")
    return values


def _check_count(values: NDArray[Any], num_samples: int | None, things: str, key: str) -> None:
    if values.ndim != 1 or num_samples not in (None, len(values)):
        given = f"{len(values):,} {things}" if values.ndim == 1 else f"an array of shape {values.shape}"
        samples = "" if num_samples is None else f" for {num_samples:,} training samples"
        raise RefusedError(
            f"gives {given}{samples}",
            key=key,
            suggestion="Give one for each sample, including held-out samples.",
        )
