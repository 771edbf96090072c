"""The order of a mixture: that of a plain program which counts turns one by one, for every seed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from ddpexp.data.mixture.order import MixtureOrder
from ddpexp.data.mixture.weights import quotas
from ddpexp.data.order import Order, Permutation
from tests.orders import Shuffled

WORDS = 2**64
STRIDE = 0x9E3779B97F4A7C15
STAGES = [(0, (0.6, 0.3, 0.1)), (23_000, (0.1, 0.9, 0.0)), (31_000, (0.5, 0.2, 0.3)), (36_000, (0.5, 0.2, 0.3))]
LENGTHS = (1501, 700, 700)


def scrambled(word: int) -> int:
    """Return a word after SplitMix64's finaliser. Source: Steele, Lea & Flood, 2014."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % WORDS
    word = (word ^ word >> 27) * 0x94D049BB133111EB % WORDS
    return word ^ word >> 31


def turns(counts: Sequence[int], seed: int) -> list[int]:
    """Return the sources of a cycle: the n-th sample of one comes at (n + a fraction drawn by SplitMix64) / count."""
    times, state = [], seed
    for source, count in enumerate(counts):
        for number in range(count):
            state = (state + STRIDE) % WORDS
            times.append(((number + (scrambled(state) >> 11) / 2**53) / count, source))
    return [source for _, source in sorted(times, key=lambda time: time[0])]


def plain(seed: int, num_samples: int) -> list[int]:
    """Return the indices of the first samples of the run."""
    visits, orders, found = [0] * len(LENGTHS), dict[tuple[int, int], list[int]](), []
    ends = [*(start for start, _ in STAGES[1:]), num_samples]
    for number, ((start, weights), end) in enumerate(zip(STAGES, ends, strict=True)):
        cycle = turns(quotas(weights), seed + number)
        for position in range(end - start):
            source = cycle[position % len(cycle)]
            epoch, place = divmod(visits[source], LENGTHS[source])
            visits[source] += 1
            if (source, epoch) not in orders:
                child = scrambled((scrambled(seed % WORDS) + source + 1) % WORDS)
                order = Permutation(LENGTHS[source], child, epoch)
                orders[source, epoch] = order(np.arange(LENGTHS[source])).tolist()
            found.append(sum(LENGTHS[:source]) + orders[source, epoch][place])
    return found


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5, WORDS - 2, WORDS + 7, -3])
def test_the_samples_are_those_of_a_plain_program(seed: int) -> None:
    mixture = MixtureOrder([Shuffled(length) for length in LENGTHS], LENGTHS, STAGES, 9_000)
    found = [mixture.order(seed, epoch)(np.arange(9_000)) for epoch in range(5)]
    assert np.concatenate(found).tolist() == plain(seed, 45_000)


def sources(seed: int, start: int = 0) -> list[int]:
    """Return the sources of a thousand samples."""
    lengths = (5000, 5000)
    mixture = MixtureOrder([Shuffled(5000)] * 2, lengths, [(0, (1, 1)), (10_000, (2, 2))], 20_000)
    indices = mixture.order(seed, 0)(np.arange(start, start + 1000))
    return [int(index >= lengths[0]) for index in indices]


def test_the_turns_of_the_sources_depend_on_the_seed_and_on_the_stage() -> None:
    assert len({tuple(sources(seed)) for seed in range(20)}) == 20
    assert sources(3) == sources(3)
    assert sources(3, start=10_000) != sources(3)


def test_equal_sources_are_visited_in_orders_of_their_own() -> None:
    mixture = MixtureOrder([Shuffled(500)] * 2, (500, 500), [(0, (1, 1))], 1000)

    def visits(seed: int, source: int) -> list[int]:
        indices = mixture.order(seed, 0)(np.arange(1000))
        return [int(index) % 500 for index in indices if index // 500 == source]

    assert len({tuple(visits(seed, source)) for seed in range(4) for source in range(2)}) == 8


@dataclass(frozen=True)
class Watched:
    """A source whose orders are counted, and seen to be freed."""

    samples_per_epoch: int
    made: list[weakref.ref[Order]] = field(default_factory=list)

    def order(self, seed: int, epoch: int) -> Order:
        order = Permutation(self.samples_per_epoch, seed, epoch)
        self.made.append(weakref.ref(order))
        return order


def test_the_orders_of_few_epochs_are_made_once_and_those_of_many_are_not_all_held() -> None:
    source = Watched(10)
    order = MixtureOrder([source], [10], [(0, (1,))], 100_000).order(0, 0)
    for _ in range(3):
        order(np.arange(2560))
    assert len(source.made) == 256
    order(np.arange(2560, 50_000))
    assert len(source.made) == 5000
    assert sum(made() is not None for made in source.made) <= 256
