"""A training order that puts samples of similar length into the same batch, so that little of it is padding.

It is made of another order. Positions are cut into pools of `_POOL` global batches; within a pool samples are sorted
by length, cut into global batches, and these are shuffled. So step k has the same samples at every number of workers,
an epoch visits what the other order visits, and a place in the middle costs no more than its pool.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpexp.data.order import STRIDE, Listed, Order, Permutation, TrainingOrder, piecewise

_POOL = 200  # global batches: enough that their samples differ little in length, few enough that epochs stay random


@dataclass(frozen=True)
class ByLength:
    """Another training order, with samples of similar length in the same global batch.

    Shapes: lengths (num_samples,), by the indices of that order.
    """

    base: TrainingOrder
    lengths: NDArray[Any]
    batch_size: int

    @property
    def samples_per_epoch(self) -> int:
        """Return the number of positions in an epoch."""
        return self.base.samples_per_epoch

    def order(self, seed: int, epoch: int) -> Order:
        """Return the order of one epoch."""
        return _Pooled(self, seed, epoch, self.base.order(seed, epoch))

    def padding(self, seed: int, micro_batch_size: int) -> tuple[float, float]:
        """Return the share of padding in the first pool of the first epoch, and that without buckets."""
        positions = np.arange(min(_POOL * self.batch_size, self.samples_per_epoch))
        orders = self.order(seed, 0), self.base.order(seed, 0)
        ours, theirs = (padding(self.lengths[order(positions)], micro_batch_size) for order in orders)
        return ours, theirs

    @property
    def digest(self) -> str:
        """Return a hash of the lengths."""
        values = self.lengths.astype(self.lengths.dtype.newbyteorder("<"))
        return hashlib.sha256(values.tobytes()).hexdigest()


@dataclass(frozen=True)
class _Pooled:
    by_length: ByLength
    seed: int
    epoch: int
    base: Order
    _last: dict[int, Listed] = field(default_factory=dict)  # the pool that was asked for last

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices at these positions. Shapes: any; the result has the same."""
        return piecewise(positions, _POOL * self.by_length.batch_size, self._pool)

    def _pool(self, number: int) -> Listed:
        if number not in self._last:
            size = self.by_length.batch_size
            first = number * _POOL * size
            stop = min(first + _POOL * size, self.by_length.samples_per_epoch)
            samples = self.base(np.arange(first, stop))
            # What is left over at the end of an epoch is not trained on: it must not be the longest samples.
            count = len(samples) // size
            whole, rest = samples[: count * size], samples[count * size :]
            batches = whole[np.argsort(self.by_length.lengths[whole], kind="stable")].reshape(count, size)
            if count:
                seed = self.seed * int(STRIDE) + number + 1
                batches = batches[Permutation(count, seed, self.epoch)(np.arange(count))]
            self._last.clear()
            self._last[number] = Listed(np.concatenate([batches.ravel(), rest]))
        return self._last[number]


def padding(lengths: NDArray[Any], batch_size: int) -> float:
    """Return the share of padding in batches of consecutive samples, each padded to its longest.

    Shapes: lengths (num_samples,), in the order of training.
    """
    whole = lengths[: len(lengths) // batch_size * batch_size].reshape(-1, batch_size)
    padded = float(whole.max(axis=1).sum()) * batch_size
    return 1 - float(whole.sum()) / padded if padded else 0.0
