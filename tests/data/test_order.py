"""The order of samples: an exact permutation at every length, reproducible everywhere, and without visible pattern.

The statistical tests compare against values known exactly for a true shuffle. Seeds are fixed, so an outcome never
varies; the bounds of about five standard deviations are ones a true shuffle would practically never exceed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from ddpexp.data.order import Permutation, by_value

BIG = 60_000
EPOCHS = range(24)
FEW = 5.0  # Standard deviations.


def whole(length: int, seed: int = 0, epoch: int = 0) -> NDArray[np.int64]:
    return Permutation(length, seed, epoch)(np.arange(length))


@pytest.fixture(scope="module")
def orders() -> list[NDArray[np.int64]]:
    return [whole(BIG, seed=3, epoch=epoch) for epoch in EPOCHS]


def chi_square_z(counts: NDArray[np.int64], expected: float, freedom: int) -> float:
    """Measure how far counts are from equal, in standard deviations of chi-square at this many degrees of freedom."""
    return float((((counts - expected) ** 2).sum() / expected - freedom) / math.sqrt(2 * freedom))


def grid_z(rows: NDArray[np.int64], columns: NDArray[np.int64], side: int) -> float:
    """Measure how unevenly pairs of bins fill a square grid, its row and column totals being (nearly) fixed."""
    counts = np.bincount(rows * side + columns, minlength=side * side)
    return chi_square_z(counts, len(rows) / side**2, (side - 1) ** 2)


def equal_pairs(values: NDArray[np.int64]) -> int:
    counts = np.unique(values, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def cycles(order: NDArray[np.int64]) -> int:
    successors, seen, count = order.tolist(), [False] * len(order), 0
    for start in range(len(successors)):
        count += not seen[start]
        while not seen[start]:
            seen[start] = True
            start = successors[start]
    return count


def mean_z(values: Sequence[float], mean: float, variance: float) -> float:
    return (float(np.mean(values)) - mean) / math.sqrt(variance / len(values))


# --- Exactness -------------------------------------------------------------------------------------------------------


def test_every_length_up_to_2100_gives_each_index_once() -> None:
    for length in range(1, 2101):
        assert np.array_equal(np.sort(whole(length, seed=length, epoch=1)), np.arange(length)), length


@pytest.mark.parametrize(
    "length", [4095, 4096, 4097, 8192, 8193, 60_000, 65_535, 65_536, 65_537, 131_071, 131_073, 1_000_003]
)
def test_longer_lengths_give_each_index_once(length: int) -> None:
    assert np.bincount(whole(length, seed=7, epoch=2), minlength=length).tolist() == [1] * length


@pytest.mark.parametrize("length", [10**9, 2**29 + 1, 2**31 + 1, 2**32, 2**32 + 1, 2**40, 2**61 + 1, 2**62])
def test_huge_lengths_stay_in_range_and_never_repeat(length: int) -> None:
    order = Permutation(length, seed=1, epoch=0)
    positions = np.concatenate([np.arange(100_000), np.arange(length - 100_000, length)])
    indices = order(positions)
    assert indices.dtype == np.int64
    assert indices.min() >= 0
    assert indices.max() < length
    assert len(np.unique(indices)) == len(positions)
    assert abs(chi_square_z(np.bincount(indices // -(-length // 256), minlength=256), 200_000 / 256, 255)) < FEW


@pytest.mark.parametrize("length", [1, 10, 4096, 4097, BIG])
def test_any_stretch_equals_the_same_stretch_of_the_whole(length: int) -> None:
    order = Permutation(length, seed=5, epoch=9)
    full = order(np.arange(length))
    scattered = (np.arange(500) * 7919) % length
    assert np.array_equal(order(np.arange(length // 3, length)), full[length // 3 :])
    assert np.array_equal(order(scattered), full[scattered])


@pytest.mark.parametrize("length", [100, BIG])
def test_result_has_the_shape_of_the_positions(length: int) -> None:
    order = Permutation(length, seed=5, epoch=9)
    grid = np.arange(60).reshape(3, 4, 5)
    assert np.array_equal(order(grid), order(np.arange(60)).reshape(3, 4, 5))
    assert order(grid.transpose()).shape == (5, 4, 3)
    assert np.array_equal(order(grid.transpose()), order(grid).transpose())
    assert order(np.array(7)).shape == ()
    assert order(np.array([], dtype=np.int64)).shape == (0,)


def test_positions_are_left_unchanged_and_results_share_no_memory() -> None:
    for length in (100, BIG):
        order = Permutation(length, seed=0, epoch=0)
        positions = np.arange(100)
        first = order(positions)
        kept = first.copy()
        first[:] = -1
        assert np.array_equal(positions, np.arange(100))
        assert np.array_equal(order(positions), kept)


def test_a_used_order_equals_hashes_and_pickles_like_a_fresh_one() -> None:
    for length in (100, BIG):
        used, fresh = Permutation(length, 1, 2), Permutation(length, 1, 2)
        indices = used(np.arange(50))
        assert used == fresh
        assert hash(used) == hash(fresh)
        assert np.array_equal(pickle.loads(pickle.dumps(used))(np.arange(50)), indices)
        with pytest.raises(dataclasses.FrozenInstanceError):
            used.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize("length", [0, -1, 2**62 + 1])
def test_impossible_lengths_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"length of an order must be between 1 .* it is {length}"):
        Permutation(length, seed=0, epoch=0)


@pytest.mark.parametrize("length", [10, BIG])
def test_positions_outside_the_length_are_refused(length: int) -> None:
    order = Permutation(length, seed=0, epoch=0)
    for outside in (-1, length):
        with pytest.raises(ValueError, match=rf"Positions must be in \[0, {length}\)"):
            order(np.array([0, outside]))


# --- Reproducibility -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "seed", "epoch", "golden"),
    [
        (1, 0, 0, [0, 0, 0, 0, 0, 0, 0, 0]),
        (10, 0, 0, [6, 3, 1, 5, 0, 2, 9, 4]),
        (10, 0, 1, [4, 6, 5, 1, 8, 0, 9, 3]),
        (4096, 1, 2, [1532, 1536, 642, 3999, 779, 3398, 3080, 3880]),
        (4097, 1, 2, [2284, 567, 2749, 3484, 1506, 80, 2975, 1610]),
        (60000, 0, 0, [44751, 36693, 46895, 38153, 4907, 52159, 48657, 33328]),
        (60000, 0, 1, [28961, 14105, 44171, 23079, 54105, 19132, 10313, 21968]),
        (60000, 1, 0, [10615, 30850, 24777, 56899, 25872, 52248, 48132, 25833]),
        (60000, -1, 0, [50175, 10797, 59360, 24036, 53634, 23333, 50350, 43990]),
        (1000000000, 42, 7, [742931530, 182297153, 212041946, 131517764, 69474185, 246571213, 624277172, 283446753]),
        (
            1099511627776,
            42,
            7,
            [
                584154665422,
                462997161261,
                425434497334,
                444111460315,
                315194436106,
                1044709892865,
                292398010546,
                93462365464,
            ],
        ),
        (
            4611686018427387904,
            18446744073709551615,
            3,
            [
                1449424655122501089,
                3175791525394074903,
                2187667134039619990,
                270369081441349757,
                2623243072285739908,
                3954475698417087023,
                2108809134022747883,
                2014766254598578806,
            ],
        ),
    ],
)
def test_orders_never_change_between_versions_and_platforms(
    length: int, seed: int, epoch: int, golden: list[int]
) -> None:
    positions = np.arange(8) * (length // 8)
    assert Permutation(length, seed, epoch)(positions).tolist() == golden


def test_memory_follows_the_number_of_positions_and_not_the_length() -> None:
    positions = np.arange(100_000)
    tracemalloc.start()
    try:
        Permutation(10**9, seed=0, epoch=0)(positions)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * len(positions)


# --- Short orders: exact counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 3, 4])
@pytest.mark.parametrize("vary", ["seed", "epoch"])
def test_all_permutations_of_a_few_elements_are_equally_frequent(length: int, vary: str) -> None:
    draws = 4800
    counts = dict.fromkeys(itertools.permutations(range(length)), 0)
    for draw in range(draws):
        order = whole(length, seed=draw, epoch=11) if vary == "seed" else whole(length, seed=11, epoch=draw)
        counts[tuple(order.tolist())] += 1
    assert abs(chi_square_z(np.array(list(counts.values())), draws / len(counts), len(counts) - 1)) < FEW


@pytest.mark.parametrize("length", range(2, 11))
def test_every_index_is_equally_frequent_at_every_position(length: int) -> None:
    draws = 1000
    values = np.stack([whole(length, seed=draw % 30, epoch=draw // 30) for draw in range(draws)])
    counts = np.bincount((np.arange(length) * length + values).ravel(), minlength=length**2)
    # Every row and column of a draw holds exactly one, so the cells share (length - 1)**2 degrees of freedom.
    score, freedom = ((counts - draws / length) ** 2).sum() * (length - 1) / draws, (length - 1) ** 2
    assert abs(score - freedom) < FEW * math.sqrt(2 * freedom)


# --- Long orders: statistics of a true shuffle -----------------------------------------------------------------------


@pytest.mark.parametrize("side", [8, 32, 100])
def test_indices_spread_evenly_over_every_stretch_of_positions(orders: list[NDArray[np.int64]], side: int) -> None:
    stretch = np.arange(BIG) * side // BIG
    assert abs(mean_z([grid_z(stretch, order * side // BIG, side) for order in orders], 0, 1)) < FEW


@pytest.mark.parametrize("side", [2, 3, 16, 32])
def test_remainders_of_positions_reveal_nothing_about_indices(orders: list[NDArray[np.int64]], side: int) -> None:
    positions = np.arange(BIG)
    assert abs(mean_z([grid_z(positions % side, order % side, side) for order in orders], 0, 1)) < FEW
    assert abs(mean_z([grid_z(positions % side, order * side // BIG, side) for order in orders], 0, 1)) < FEW
    assert abs(mean_z([grid_z(positions * side // BIG, order % side, side) for order in orders], 0, 1)) < FEW


@pytest.mark.parametrize("lag", [1, 2, 64, 128, 256, 8192, BIG // 2])
def test_indices_some_way_apart_are_unrelated(orders: list[NDArray[np.int64]], lag: int) -> None:
    pairs = [(order[:-lag], order[lag:]) for order in orders]
    correlations = [float(np.corrcoef(first, second)[0, 1]) for first, second in pairs]
    assert abs(mean_z(correlations, -1 / (BIG - 1), 1 / (BIG - lag))) < FEW
    assert abs(mean_z([grid_z(first * 16 // BIG, second * 16 // BIG, 16) for first, second in pairs], 0, 1)) < FEW


@pytest.mark.parametrize("lag", [1, 2, 64, 128, 256, 8192, BIG // 2])
def test_differences_some_way_apart_are_uniform_and_do_not_recur(orders: list[NDArray[np.int64]], lag: int) -> None:
    differences = [(order[lag:] - order[:-lag]) % BIG for order in orders]
    count = BIG - lag
    spread = [chi_square_z(np.bincount(d * 50 // BIG, minlength=50), count / 50, 49) for d in differences]
    assert abs(mean_z(spread, 0, 1)) < FEW
    chance = count * (count - 1) / 2 / (BIG - 1)
    assert abs(mean_z([equal_pairs(d) for d in differences], chance, chance)) < FEW


@pytest.mark.parametrize("bit", range(0, 16, 3))
def test_flipping_a_bit_of_the_position_flips_no_preferred_bits_of_the_index(bit: int) -> None:
    """The sharpest test of a Feistel network: with too few rounds the same flips recur far too often."""
    positions = np.arange(2**16)
    positions = positions[positions >> bit & 1 == 0]
    recurrences = []
    for epoch in EPOCHS:
        order = Permutation(2**16, seed=4, epoch=epoch)
        recurrences.append(equal_pairs(order(positions) ^ order(positions | 1 << bit)))
    chance = len(positions) * (len(positions) - 1) / 2 / (2**16 - 1)
    assert abs(mean_z(recurrences, chance, chance)) < FEW


def test_ascents_and_inversions_are_those_of_a_shuffle(orders: list[NDArray[np.int64]]) -> None:
    ascents = [int((np.diff(order) > 0).sum()) for order in orders]
    assert abs(mean_z(ascents, (BIG - 1) / 2, (BIG + 1) / 12)) < FEW
    some = [order[:: BIG // 1000] for order in orders]
    inversions = [int(np.triu(part[:, None] > part).sum()) for part in some]
    assert abs(mean_z(inversions, 1000 * 999 / 4, 1000 * 999 * 2005 / 72)) < FEW


def test_fixed_points_and_cycles_are_those_of_a_shuffle(orders: list[NDArray[np.int64]]) -> None:
    fixed = [int((order == np.arange(BIG)).sum()) for order in orders]
    assert abs(mean_z(fixed, 1, 1)) < FEW
    harmonic = math.log(BIG) + 0.5772
    assert abs(mean_z([cycles(order) for order in orders], harmonic, harmonic - math.pi**2 / 6)) < FEW


@pytest.mark.parametrize("neighbour", [Permutation(BIG, 3, 1), Permutation(BIG, 4, 0), Permutation(BIG + 1, 3, 0)])
def test_neighbouring_epochs_seeds_and_lengths_are_unrelated(neighbour: Permutation) -> None:
    """Step from one (length, seed, epoch) to the next along whichever of the three `neighbour` differs in."""
    steps = neighbour.length - BIG, neighbour.seed - 3, neighbour.epoch
    chain = [whole(BIG + steps[0] * i, 3 + steps[1] * i, steps[2] * i)[: BIG - 1] for i in range(len(EPOCHS))]
    pairs = list(itertools.pairwise(chain))
    count = BIG - 1
    correlations = [float(np.corrcoef(first, second)[0, 1]) for first, second in pairs]
    assert abs(mean_z(correlations, 0, 1 / count)) < FEW
    assert abs(mean_z([int((first == second).sum()) for first, second in pairs], 1, 1)) < FEW
    chance = count * (count - 1) / 2 / BIG
    recurrences = [equal_pairs((second - first) % BIG) for first, second in pairs]
    assert abs(mean_z(recurrences, chance, chance)) < FEW


def test_batches_of_data_sorted_by_class_have_hypergeometric_class_counts(orders: list[NDArray[np.int64]]) -> None:
    batch, classes = 128, 10
    batches = BIG // batch
    spread, changes = [], []
    for order in orders:
        labels = order * classes // BIG
        cells = np.arange(batches * batch) // batch * classes + labels[: batches * batch]
        counts = np.bincount(cells, minlength=batches * classes)
        # Drawing without replacement narrows the spread by (BIG - batch) / (BIG - 1).
        chi_square = ((counts - batch / classes) ** 2).sum() / (batch / classes) * (BIG - 1) / (BIG - batch)
        spread.append(float(chi_square / batches))
        changes.append(int((labels[1:] != labels[:-1]).sum()))
    assert abs(mean_z(spread, classes - 1, 2 * (classes - 1) / batches)) < FEW
    change = BIG * (1 - 1 / classes) / (BIG - 1)
    assert abs(mean_z(changes, (BIG - 1) * change, BIG * change * (1 - change))) < FEW


@pytest.mark.parametrize("values", [[], [3], [2, 2], [5, -1, 5, 0, -1], [1, 1, 4, 9, 9]])
def test_the_places_of_each_value_of_an_array(values: list[int]) -> None:
    found = {value: places.tolist() for value, places in by_value(np.array(values, np.int64))}
    assert list(found) == sorted(set(values))
    assert found == {value: [place for place, other in enumerate(values) if other == value] for value in values}
