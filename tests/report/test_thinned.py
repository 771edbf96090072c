"""What is left of a long curve."""

from __future__ import annotations

import math
import random

import pytest

from ddpexp.report.thinned import Curve, spaced


def test_a_short_curve_stays_as_it_is() -> None:
    curve = Curve.of([1, 2, 5], [0.5, 0.25, 0.75])
    assert curve.thinned(3) == curve == Curve([1, 2, 5], [0.5, 0.25, 0.75])


@pytest.mark.parametrize("most", [8, 100, 999])
def test_a_long_curve_keeps_its_spikes_its_ends_and_the_order_of_its_steps(most: int) -> None:
    draw = random.Random(most)
    values = [draw.random() for _ in range(10_000)]
    for step, spike in ((17, 50.0), (5003, -50.0), (9998, 70.0)):
        values[step] = spike
    thin = Curve.of(range(10_000), values).thinned(most)
    assert len(thin.steps) == len(thin.values) == 2 * len(thin.means) <= most
    assert {50.0, -50.0, 70.0} <= set(thin.values)
    assert (thin.steps[-1], thin.values[-1]) == (9999, values[-1])
    assert list(thin.steps) == sorted(thin.steps)
    assert all(values[step] == value for step, value in zip(thin.steps, thin.values, strict=True))


def test_each_two_points_stand_for_a_mean() -> None:
    thin = Curve.of(range(1, 102), [float(step % 2) for step in range(1, 102)]).thinned(12)
    assert thin.means == [0.5] * 5 + [1.0]


def test_what_is_not_finite_is_no_point_and_of_a_repeated_step_the_last_value_counts() -> None:
    curve = Curve.of([1, 2, 3, 2, 4], [0.1, 0.2, math.nan, 0.4, math.inf])
    assert curve == Curve([1, 2], [0.1, 0.4])


@pytest.mark.parametrize(("length", "most"), [(0, 3), (3, 3), (100, 3), (101, 7)])
def test_spaced_items_have_the_first_and_the_last(length: int, most: int) -> None:
    found = spaced(range(length), most)
    assert len(found) == min(length, most)
    assert length == 0 or (found[0], found[-1]) == (0, length - 1)
    assert found == sorted(set(found))
