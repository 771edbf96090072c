"""Learning-rate factors: pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from ddpexp.config.build import build
from ddpexp.errors import RefusedError
from ddpexp.task import Schedule
from ddpexp.train.plateau import Plateau
from ddpexp.train.schedule import WSD, Constant, Cosine, Exponential, Linear, MultiStep, OneCycle, Polynomial, Warmup
from ddpexp.train.torch_schedule import MODULE, TorchSchedule
from tests.refusals import refused

WITH_WARMUP = (Constant, Linear, Polynomial, Exponential, Cosine, MultiStep, WSD, Plateau)
ALL: list[Schedule] = [
    Constant(), Cosine(), Cosine(warmup=0), Cosine(warmup=1), Cosine(0.5, floor=0.1), OneCycle(), OneCycle(0), OneCycle(1,
        0.5, 0.5), OneCycle(warmup_steps=2), Cosine(cycles=3), Linear(), Linear(0.5, floor=0.25), Polynomial(power=0.5),
    Exponential(), MultiStep(), MultiStep(milestones=(2, 5)), WSD(), WSD(decay=1), WSD(decay_steps=3, shape="cosine"),
    WSD(shape="sqrt"), *(kind(warmup_steps=2) for kind in WITH_WARMUP),
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


@pytest.mark.parametrize(
    "schedule",
    [Constant(), Cosine(), Cosine(warmup=1), OneCycle(), OneCycle(0), Linear(), Polynomial(), Exponential(), WSD()],
    ids=repr,
)
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
    [
        *((kind, "warmup") for kind in WITH_WARMUP),
        (OneCycle, "peak_at"),
        (OneCycle, "start"),
        (OneCycle, "end"),
        *((kind, "floor") for kind in (Linear, Polynomial, Exponential, Cosine, MultiStep, WSD, Plateau)),
        (WSD, "decay"),
        (MultiStep, "gamma"),
        (Plateau, "gamma"),
    ],
)
def test_a_share_outside_zero_to_one_is_refused_with_its_key(schedule: type[Schedule], key: str, share: float) -> None:
    with refused(f"scheduler.{key}={share}"):
        build(schedule, {key: share}, "scheduler")


@pytest.mark.parametrize("kind", WITH_WARMUP)
def test_every_schedule_rises_over_a_share_of_the_steps_or_a_number_of_them(kind: type[Warmup]) -> None:
    plain = kind(warmup=0)
    for schedule in (kind(warmup=0.1), kind(warmup_steps=10), kind(warmup=0.5, warmup_steps=10)):
        found = factors(schedule, 100)
        assert found[:10] == [(step + 1) / 10 for step in range(10)]
        assert found[10:] == [plain.after_warmup(step, 10, 100) for step in range(10, 100)]
        assert found[10] == 1.0


@pytest.mark.parametrize(
    ("schedule", "num_steps", "expected"),
    [
        (Linear(floor=0.2), 5, [1, 0.8, 0.6, 0.4, 0.2]),
        (Polynomial(floor=0.0, power=2), 5, [1, 0.5625, 0.25, 0.0625, 0]),
        (Exponential(floor=0.01), 5, [1, 0.31622777, 0.1, 0.031622777, 0.01]),
        (Cosine(0, floor=0.5, cycles=2), 6, [1, 0.75, 0.5, 1, 0.75, 0.5]),
        (Cosine(0, cycles=2), 7, [1, 0.75, 0.25, 0, 1, 0.5, 0]),
        (MultiStep(milestones=(0.5, 0.75), gamma=0.5), 8, [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25]),
        (MultiStep(milestones=(1, 3), gamma=0.1, floor=0.05), 4, [1, 0.1, 0.1, 0.05]),
        (WSD(0, decay=0.5), 8, [1, 1, 1, 1, 1, 2 / 3, 1 / 3, 0]),
        (WSD(0, decay_steps=3, floor=0.5), 5, [1, 1, 1, 0.75, 0.5]),
        (WSD(0, decay_steps=5, shape="sqrt"), 5, [1, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0]),
        (WSD(0, decay_steps=3, shape="cosine"), 3, [1, 0.5, 0]),
        (OneCycle(start=0.5, warmup_steps=2), 5, [0.5, 0.75, 1, 0.5, 0]),
    ],
    ids=repr,
)
def test_the_shapes_of_schedules(schedule: Schedule, num_steps: int, expected: list[float]) -> None:
    assert factors(schedule, num_steps) == pytest.approx(expected)


def test_the_stable_phase_does_not_depend_on_the_length_of_the_run() -> None:
    schedule = WSD(warmup_steps=10, decay_steps=20)
    assert factors(schedule, 100)[:80] == factors(schedule, 1000)[:80]


@pytest.mark.parametrize(
    ("kind", "key", "value", "usage"),
    [
        (Cosine, "warmup", 100, "a number from 0 to 1. For steps, use scheduler.warmup_steps."),
        (WSD, "decay", 20.0, "a number from 0 to 1. For steps, use scheduler.decay_steps."),
        (Linear, "warmup_steps", -1, "a whole number from 0 or null."),
        (Exponential, "floor", 0.0, "a number above 0 to 1."),
        (Polynomial, "power", 0.0, "a number above 0."),
        (Cosine, "cycles", 0, "a whole number from 1."),
        (Plateau, "gamma", 1.0, "a number from 0 to below 1."),
        (Plateau, "patience", 0, "a whole number from 1."),
        (Plateau, "cooldown", -1, "a whole number from 0."),
        (Plateau, "min_delta", -1.0, "a number from 0."),
    ],
)
def test_a_value_out_of_range_is_refused(kind: type, key: str, value: float, usage: str) -> None:
    with pytest.raises(RefusedError) as refused:
        build(kind, {key: value}, "scheduler")
    assert str(refused.value).endswith(f": use {usage}")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: MultiStep(milestones=(0.5, 30)), "scheduler.milestones=[0.5,30]"),
        (lambda: MultiStep(milestones=(1.5,)), "scheduler.milestones=[1.5]"),
        (lambda: MultiStep(milestones=(0.75, 0.5)), "scheduler.milestones=[0.75,0.5]"),
        (lambda: TorchSchedule(schedule={"_target_": "torch.optim.SGD"}), "scheduler.schedule._target_=torch.optim.SGD"),
        (lambda: TorchSchedule(schedule={}), "scheduler.schedule._target_=null"),
        (
            lambda: TorchSchedule(schedule={"_target_": f"{MODULE}ReduceLROnPlateau"}),
            "scheduler.schedule._target_: scheduler=plateau",
        ),
        (
            lambda: TorchSchedule(schedule={"_target_": f"{MODULE}SequentialLR", "schedulers": [{"_target_": "x"}]}),
            "scheduler.schedule.schedulers[0]._target_=x",
        ),
    ],
)  # fmt: skip
def test_values_that_make_no_schedule_are_refused(make: Callable[[], Schedule], sentence: str) -> None:
    with refused(sentence):
        make()
