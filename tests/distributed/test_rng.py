"""Seeds of micro-batches."""

from __future__ import annotations

from itertools import islice

import pytest

from ddpexp.distributed.rng import DATA, MODEL, MicroBatchSeeds, seed_of


@pytest.mark.parametrize(("seed", "stream"), [(0, MODEL), (7, DATA), (2**63 + 5, MODEL)])
@pytest.mark.parametrize("step", [0, 3, 255, 10**6, 2**40])
def test_seeds_hashed_together_are_those_of_each_place(seed: int, stream: int, step: int) -> None:
    seeds = MicroBatchSeeds(seed, stream, range(6, 9))
    expected = [[seed_of(seed, stream, step + offset, number) for number in range(6, 9)] for offset in range(300)]
    assert list(islice(seeds.from_step(step), 300)) == seeds.of_steps(step, 300) == expected
