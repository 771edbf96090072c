"""The order in which an epoch visits the samples, as a pure function (seed, epoch, position) -> index.

There is no sampler state: any rank computes any stretch of any epoch by itself, and resuming in the middle of an
epoch is nothing more than asking for later positions.

A long order is a Feistel network of keyed rounds over the smallest power of two that holds the length; a value
that lands past the end goes through the network again until it lands inside ("cycle walking"), which takes fewer
than two passes on average. A short order is a table shuffled by sorting random words: a network that narrow would
show patterns, and the table is small. All arithmetic is on integers of fixed width, so an order is the same on
every platform and with every version of Python and numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

# Orders up to this length come from the table. A power of two: its low bits carry the index through the sort.
_TABLE_LENGTH = 4096

# Just past the table 4 rounds show patterns at once, 6 a faint one over 1,500 epochs, 8 none. Even, so that halves of
# unequal width end on the side they started from.
_ROUNDS = 8

STRIDE = np.uint64(0x9E3779B97F4A7C15)  # between the states of a stream of random words: SplitMix64's

# Each half of a network value then fits 32 bits, and the value an int64.
_LONGEST = 2**62


Order = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Map positions of one epoch to sample indices of the same shape: pure, and O(1) or with one table."""


@runtime_checkable
class TrainingOrder(Protocol):
    """Which samples an epoch visits, and in which order, as a function of seed, epoch and position."""

    @property
    def samples_per_epoch(self) -> int:
        """Return how many positions an epoch has."""
        ...

    def order(self, seed: int, epoch: int) -> Order:
        """Return the order of one epoch, for positions in [0, samples_per_epoch)."""
        ...


@dataclass(frozen=True)
class Listed:
    """An order that is a table."""

    indices: NDArray[np.int64]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices at these positions. Shapes: any; the result has the same."""
        return self.indices[positions]


@dataclass(frozen=True)
class Permutation:
    """Map the positions of one epoch to sample indices, each index exactly once.

    Orders that differ in length, seed or epoch are unrelated, even for neighbouring numbers. Seed and epoch count
    modulo 2**64.

    Raises:
        ValueError: the length is below 1 or above 2**62.
    """

    length: int
    seed: int
    epoch: int

    def __post_init__(self) -> None:
        if not 1 <= self.length <= _LONGEST:
            raise ValueError(f"The length of an order must be between 1 and 2**62, but it is {self.length}.")

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Compute the indices at these positions, in time and memory proportional to their number.

        Shapes:
            positions: any shape; the result has the same.

        Raises:
            ValueError: a position is outside [0, length).
        """
        flat = np.asarray(positions).astype(np.int64, casting="same_kind", copy=False).ravel()
        if flat.size and (flat.min() < 0 or flat.max() >= self.length):
            raise ValueError(
                f"Positions must be in [0, {self.length}), but these reach from {flat.min()} to {flat.max()}."
            )
        indices = self._table[flat] if self.length <= _TABLE_LENGTH else self._walk(flat)
        return indices.reshape(np.shape(positions))

    def _walk(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pass positions through the network until every value lands inside the length.

        Source:
            Black & Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002).
        """
        width = (self.length - 1).bit_length()
        indices = _network(positions, width, self._round_keys)
        outside = np.flatnonzero(indices >= self.length)
        while outside.size:
            values = _network(indices[outside], width, self._round_keys)
            indices[outside] = values
            outside = outside[values >= self.length]
        return indices

    @cached_property
    def _table(self) -> NDArray[np.int64]:
        # With the index in their low bits no two words are equal, so nothing depends on how a sort treats ties.
        low = np.uint64(_TABLE_LENGTH - 1)
        words = self._random_words(self.length) & ~low | np.arange(self.length, dtype=np.uint64)
        table: NDArray[np.int64] = (np.sort(words) & low).astype(np.int64)
        return table

    @cached_property
    def _round_keys(self) -> NDArray[np.uint32]:
        keys: NDArray[np.uint32] = (self._random_words(_ROUNDS) >> np.uint64(32)).astype(np.uint32)
        return keys

    def _random_words(self, count: int) -> NDArray[np.uint64]:
        """Draw the first words of a stream that belongs to this length, seed and epoch alone.

        Source:
            Steele, Lea & Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014): SplitMix64.
        """
        # The tag keeps these streams apart from any other use of the same seed.
        key = np.frombuffer(b"ddporder", dtype="<u8").astype(np.uint64)
        for part in (self.length, self.seed, self.epoch):
            key = mix((key ^ np.uint64(part % 2**64)) + STRIDE)
        return mix(key + np.arange(1, count + 1, dtype=np.uint64) * STRIDE)


@lru_cache(maxsize=1024)
def permutation(length: int, seed: int, epoch: int) -> Permutation:
    """Return a permutation that is asked for repeatedly: its keys and table are computed once."""
    return Permutation(length, seed, epoch)


def piecewise(positions: NDArray[np.int64], size: int, piece: Callable[[int], Order]) -> NDArray[np.int64]:
    """Return the indices at positions of an order in pieces of `size`; `piece` returns the order of each by its number.

    Shapes: any; the result has the same.
    """
    flat = np.asarray(positions, np.int64).ravel()
    indices = np.empty_like(flat)
    numbers, within = np.divmod(flat, size)
    for number, chosen in by_value(numbers):
        indices[chosen] = piece(number)(within[chosen])
    return indices.reshape(np.shape(positions))


def mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble each word one-to-one, every output bit depending on every input bit (SplitMix64's finaliser)."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def uniforms(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Turn random words into numbers on [0, 1)."""
    numbers: NDArray[np.float64] = (words >> np.uint64(11)) * 2.0**-53
    return numbers


def by_value(values: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each value and the places where it is, both ascending. Shapes: values (n,).

    In the time of one sort, however many values differ (the first call of numpy's `unique` takes 5 ms of imports).
    """
    places = np.argsort(values, kind="stable")
    ordered = values[places]
    ends = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1, len(ordered))
    first = 0
    for end in ends.tolist() if len(ordered) else []:
        yield int(ordered[first]), places[first:end]
        first = end


def _network(values: NDArray[np.int64], width: int, keys: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Permute the integers of `width` bits: each round xors one half with a keyed hash of the other.

    Shapes:
        values: [n], each in [0, 2**width); keys: [rounds], rounds even.
    Source:
        Luby & Rackoff, "How to Construct Pseudorandom Permutations" (1988);
        the hash's multipliers: Chris Wellons, "Prospecting for Hash Functions" (2018), lowbias32.
    """
    right_width = width // 2
    left_width = width - right_width
    left = (values >> right_width).astype(np.uint32)
    right = (values & (1 << right_width) - 1).astype(np.uint32)
    hashed, shifted = np.empty_like(left), np.empty_like(left)
    # As arrays: numpy takes half a microsecond to convert a number, and most calls are for few values.
    first, second, half = (np.array(word, np.uint32) for word in (0x7FEB352D, 0x846CA68B, 16))
    drop, drop_next = (np.array(32 - width, np.uint32) for width in (left_width, right_width))
    for key in keys[:, None]:
        np.add(right, key, out=hashed)
        hashed *= first
        np.right_shift(hashed, half, out=shifted)
        hashed ^= shifted
        hashed *= second
        hashed >>= drop  # The high bits of a product are its best mixed.
        left ^= hashed
        left, right = right, left
        drop, drop_next = drop_next, drop
    return left.astype(np.int64) << right_width | right
