"""The training order of a mixture: a pure function (seed, epoch, position) -> (source, sample), O(1) to seek.

The sources take turns in cycles of at least 10,000 samples, in which each has a fixed number. Within a cycle their
samples are spread evenly, up to a random shift of each by less than the distance to the next: after any number of
samples, the count of a source differs from its share by less than the number of sources. The n-th sample of a source in
the whole run is the n-th of its own training order, epoch after epoch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from ddpexp.data.mixture.weights import quotas
from ddpexp.data.order import STRIDE, Order, TrainingOrder, by_value, mix, piecewise, uniforms

_MASK = 2**64 - 1
_MOST_ORDERS = 256


class Cycle:
    """How the sources take turns."""

    def __init__(self, counts: Sequence[int], seed: int) -> None:
        """`counts`: how many samples of each source."""
        self.counts = np.array(counts, np.int64)
        self.length = int(self.counts.sum())
        sources = np.repeat(np.arange(len(counts)), self.counts)
        ranks = np.concatenate([np.arange(count) for count in counts])
        words = mix(np.arange(1, self.length + 1, dtype=np.uint64) * STRIDE + np.uint64(seed & _MASK))
        by_time = np.argsort((ranks + uniforms(words)) / self.counts[sources], kind="stable")
        self.sources = sources[by_time]
        self.ranks = np.empty_like(ranks)  # the number of a source's samples before each position
        for source in range(len(counts)):
            places = np.flatnonzero(self.sources == source)
            self.ranks[places] = np.arange(len(places))

    def before(self, position: int) -> NDArray[np.int64]:
        """Return how many samples of each source come before a position, cycle after cycle."""
        whole, rest = divmod(position, self.length)
        found: NDArray[np.int64] = whole * self.counts + np.bincount(self.sources[:rest], minlength=len(self.counts))
        return found


@lru_cache(maxsize=64)
def _cycle(counts: tuple[int, ...], seed: int) -> Cycle:
    """Return a cycle, whose tables are made once."""
    return Cycle(counts, seed)


@dataclass(frozen=True)
class MixtureOrder:
    """The training order of several sources that are numbered one after the other.

    `stages`: the position from which on each tuple of weights counts, over all epochs; the first is 0.
    """

    sources: Sequence[TrainingOrder]
    lengths: Sequence[int]  # the number of samples of each source
    stages: Sequence[tuple[int, Sequence[float]]]
    samples_per_epoch: int

    def order(self, seed: int, epoch: int) -> Order:
        """Return the order of one epoch."""
        return _EpochOrder(self, seed, epoch * self.samples_per_epoch)


@dataclass(frozen=True)
class _EpochOrder:
    mixture: MixtureOrder
    seed: int
    first: int  # position of the epoch in the run
    _orders: dict[tuple[int, int], Order] = field(default_factory=dict)  # of the epochs of the sources

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return indices into the sources one after the other. Shapes: any; the result has the same."""
        places = np.asarray(positions).ravel() + self.first
        indices = np.empty_like(places)
        stages = np.searchsorted(self._starts, places, side="right") - 1
        for stage, chosen in by_value(stages):
            cycle, before = self._cycles[stage]
            number, rest = np.divmod(places[chosen] - self._starts[stage], cycle.length)
            sources = cycle.sources[rest]
            visits = before[sources] + number * cycle.counts[sources] + cycle.ranks[rest]
            indices[chosen] = self._looked_up(sources, visits)
        return indices.reshape(np.shape(positions))

    def _looked_up(self, sources: NDArray[np.int64], visits: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of the given visits of sources, counted over the whole run."""
        indices = np.empty_like(visits)
        offset = 0
        for source, (order, length) in enumerate(zip(self.mixture.sources, self.mixture.lengths, strict=True)):
            chosen = np.flatnonzero(sources == source)
            in_epochs = partial(self._order_of, source)
            indices[chosen] = offset + piecewise(visits[chosen], order.samples_per_epoch, in_epochs)
            offset += length
        return indices

    def _order_of(self, source: int, epoch: int) -> Order:
        if (source, epoch) not in self._orders:
            if len(self._orders) >= _MOST_ORDERS:  # of small sources there are many epochs
                self._orders.clear()
            word = mix(np.array([self.seed & _MASK], np.uint64)) + np.uint64(source + 1)
            self._orders[source, epoch] = self.mixture.sources[source].order(int(mix(word)[0]), epoch)
        return self._orders[source, epoch]

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return np.array([start for start, _ in self.mixture.stages], np.int64)

    @cached_property
    def _cycles(self) -> list[tuple[Cycle, NDArray[np.int64]]]:
        """Return for each stage how the sources take turns, and how often each was visited before."""
        found: list[tuple[Cycle, NDArray[np.int64]]] = []
        visits = np.zeros(len(self.mixture.sources), np.int64)
        for number, (start, weights) in enumerate(self.mixture.stages):
            if number:
                previous = self.mixture.stages[number - 1][0]
                visits = visits + found[-1][0].before(start - previous)
            found.append((_cycle(tuple(quotas(weights)), self.seed + number), visits))
        return found
