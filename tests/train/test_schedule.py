"""Learning-rate factors: pure functions of the step."""

from __future__ import annotations

import math

import pytest

from ddpexp.errors import RefusedError
from ddpexp.task import Schedule
from ddpexp.train.schedule import Constant, Cosine, OneCycle

ALL: list[Schedule] = [
    Constant(), Cosine(), Cosine(warmup=0), Cosine(warmup=1), Cosine(0.5, 0.1), OneCycle(), OneCycle(0), OneCycle(1,
        0.5, 0.5),
]  # fmt: skip


def factors(schedule: Schedule, num_steps: int) -> list[float]:
    return [schedule.factor(step, num_steps) for step in range(num_steps)]


def test_constant_keeps_the_learning_rate() -> None:
    assert factors(Constant(), 5) == [1.0] * 5


def test_cosine_rises_linearly_then_falls_to_its_floor() -> None:
    found = factors(Cosine(warmup=0.1, floor=0.01), 100)
    assert found[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert found[10] == 1.0
    assert found[-1] == pytest.approx(0.01)
    assert found[10:] == sorted(found[10:], reverse=True)
    middle = (10 + 99) / 2
    assert (found[math.floor(middle)] + found[math.ceil(middle)]) / 2 == pytest.approx((1 + 0.01) / 2)


def test_cosine_without_warmup_starts_at_the_peak() -> None:
    assert factors(Cosine(warmup=0), 11)[::5] == pytest.approx([1.0, 0.5, 0.0])


def test_one_cycle_starts_low_peaks_where_it_should_and_ends_low() -> None:
    found = factors(OneCycle(peak_at=0.3, start=0.04, end=0.001), 101)
    assert (found[0], found[30], found[-1]) == pytest.approx((0.04, 1.0, 0.001))
    assert found[:31] == sorted(found[:31])
    assert found[30:] == sorted(found[30:], reverse=True)


def test_one_cycle_is_torchs_one_cycle() -> None:
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    reference = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1.0, total_steps=50, pct_start=0.22, div_factor=25, final_div_factor=1e4, cycle_momentum=False
    )
    expected = []
    for _ in range(50):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    assert factors(OneCycle(peak_at=10 / 49, start=1 / 25, end=1 / 25 / 1e4), 50) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ALL, ids=repr)
@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 1000])
def test_every_factor_is_finite_and_between_zero_and_one(schedule: Schedule, num_steps: int) -> None:
    for factor in factors(schedule, num_steps):
        assert 0 <= factor <= 1


@pytest.mark.parametrize("schedule", [Constant(), Cosine(), Cosine(warmup=1), OneCycle(), OneCycle(0)], ids=repr)
def test_a_run_of_one_step_learns(schedule: Schedule) -> None:
    assert schedule.factor(0, 1) > 0


def test_a_factor_depends_on_nothing_but_the_step() -> None:
    schedule = Cosine()
    late = schedule.factor(70, 100)
    factors(schedule, 100)
    assert schedule.factor(70, 100) == late


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan, math.inf])
@pytest.mark.parametrize(
    ("schedule", "key"),
    [(Cosine, "warmup"), (Cosine, "floor"), (OneCycle, "peak_at"), (OneCycle, "start"), (OneCycle, "end")],
)
def test_a_share_outside_zero_to_one_is_refused_with_its_key(schedule: type[Schedule], key: str, share: float) -> None:
    with pytest.raises(
        RefusedError, match=rf"^scheduler\.{key}={share} is not a fraction: use a number from 0 to 1\.$"
    ):
        schedule(**{key: share})
