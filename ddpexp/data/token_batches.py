"""Batches of as many tokens as fit: short samples many at a time, long ones few.

Samples of similar length are a bucket, by their lengths alone. A bucket has batches of one size, as many samples of its
longest as fit; which of its samples are in which batch, and where in the epoch the batch comes, are permutations by
seed and epoch. So every epoch has equally many batches of the same sizes, a place in it is found without those before,
and each sample is visited once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ddpexp.data.order import STRIDE, Order, Permutation, permutation
from ddpexp.errors import RefusedError

_SPREAD = 1.06  # the longest sample of a bucket as a multiple of the shortest: about 3 % of a batch is padding then
_BATCHES = 2  # of a bucket at least, although its lengths differ by more: else there would be many batches half full


@dataclass(frozen=True)
class _Bucket:
    """The samples `first` to below `first + count` in the sequence by length, in batches of `size`."""

    first: int
    count: int
    size: int

    @property
    def num_batches(self) -> int:
        return -(-self.count // self.size)


@dataclass(frozen=True)
class ByTokens:
    """The training order of batches by tokens: its positions are batches, of which `members` are the samples.

    Shapes: lengths (num_samples,), in tokens.
    """

    lengths: NDArray[np.float64]
    most_tokens: int  # of a batch, with its padding

    @cached_property
    def _sequence(self) -> NDArray[np.int64]:
        """The samples by length."""
        return np.argsort(self.lengths, kind="stable")

    @cached_property
    def _buckets(self) -> Sequence[_Bucket]:
        return _divided(self.lengths[self._sequence], self.most_tokens)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """The end of each bucket, in batches."""
        return np.cumsum([bucket.num_batches for bucket in self._buckets])

    @property
    def samples_per_epoch(self) -> int:
        """Return the number of batches in an epoch."""
        return int(self._ends[-1])

    @property
    def mean_size(self) -> float:
        """Return the mean number of samples of a batch."""
        return len(self.lengths) / self.samples_per_epoch

    def order(self, seed: int, epoch: int) -> Order:
        """Return the order of the batches of one epoch."""
        return Permutation(self.samples_per_epoch, seed, epoch)

    def members(self, seed: int, epoch: int, batches: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the indices of the samples of each batch. Shapes: batches (n,); n arrays of their sizes."""
        found = []
        for batch in batches.tolist():
            number = int(np.searchsorted(self._ends, batch, side="right"))
            bucket = self._buckets[number]
            first = (batch - int(self._ends[number]) + bucket.num_batches) * bucket.size
            places = np.arange(first, min(first + bucket.size, bucket.count))
            found.append(self._sequence[bucket.first + self._shuffle(seed, epoch, number)(places)])
        return found

    def sizes(self, batches: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of samples of each batch. Shapes: any; the result has the same."""
        numbers = np.searchsorted(self._ends, batches, side="right")
        size, count, length = (
            np.array([getattr(bucket, name) for bucket in self._buckets]) for name in ("size", "count", "num_batches")
        )
        first = (batches - self._ends[numbers] + length[numbers]) * size[numbers]
        sizes: NDArray[np.int64] = np.minimum(size[numbers], count[numbers] - first)
        return sizes

    def num_samples(self, seed: int, epoch: int, positions: NDArray[np.int64]) -> int:
        """Return the number of samples of the batches at these positions of an epoch."""
        return int(self.sizes(self.order(seed, epoch)(positions)).sum())

    @property
    def largest(self) -> NDArray[np.int64]:
        """Return the samples of a batch of the most tokens, for an estimate of memory."""
        tokens = [min(one.size, one.count) * float(self._longest(one)) for one in self._buckets]
        bucket = self._buckets[int(np.argmax(tokens))]
        stop = bucket.first + bucket.count
        return self._sequence[stop - min(bucket.size, bucket.count) : stop]

    @property
    def padding(self) -> float:
        """Return the share of padding in the batches of the first epoch, each padded to its longest sample."""
        padded = 0.0
        for number, bucket in enumerate(self._buckets):  # not batch by batch: there may be millions
            shuffled = self._shuffle(0, 0, number)(np.arange(bucket.count))
            lengths = self.lengths[self._sequence[bucket.first + shuffled]]
            firsts = np.arange(0, bucket.count, bucket.size)
            sizes = np.minimum(bucket.size, bucket.count - firsts)
            padded += float(np.maximum.reduceat(lengths, firsts) @ sizes)
        return 1 - float(self.lengths.sum()) / padded if padded else 0.0

    @property
    def digest(self) -> str:
        """Return a hash of what decides who is in which batch."""
        values = self.lengths.astype("<f8").tobytes()
        return hashlib.sha256(values + f" {self.most_tokens}".encode()).hexdigest()

    def _longest(self, bucket: _Bucket) -> np.float64:
        longest: np.float64 = self.lengths[self._sequence[bucket.first + bucket.count - 1]]
        return longest

    def _shuffle(self, seed: int, epoch: int, number: int) -> Permutation:
        return permutation(self._buckets[number].count, seed * int(STRIDE) + number + 1, epoch)


def by_tokens(lengths: NDArray[np.float64], most_tokens: int) -> ByTokens:
    """Return the order of batches of at most so many tokens.

    Raises:
        RefusedError: a sample alone has more.
    """
    longest = int(lengths.argmax())
    if lengths[longest] > most_tokens:
        raise RefusedError(
            f"is less than the {lengths[longest]:g} tokens of training sample {longest}, which no batch could hold",
            key="data.batch_tokens",
            value=most_tokens,
            suggestion=f"Use data.batch_tokens={int(np.ceil(lengths[longest]))} or more, or shorten the sample.",
        )
    return ByTokens(lengths, most_tokens)


def _divided(ordered: NDArray[np.float64], most_tokens: int) -> list[_Bucket]:
    """Divide samples, whose lengths rise, into buckets, from the longest on."""
    buckets, stop = [], len(ordered)
    while stop:
        size = max(1, int(most_tokens // max(ordered[stop - 1], 1)))
        first = int(np.searchsorted(ordered[:stop], ordered[stop - 1] / _SPREAD))
        first = min(first, max(0, stop - _BATCHES * size))
        if stop - first > size and first:  # only the last bucket has a batch that is not full
            first += (stop - first) % size
        buckets.append(_Bucket(first, stop - first, size))
        stop = first
    return buckets[::-1]
