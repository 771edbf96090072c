"""The rates of all parameter groups, and schedules that have a state."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ddpexp.checkpoint.codec import decode, encode
from ddpexp.config.instantiate import Trust
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.task import Schedule, StatefulSchedule
from ddpexp.train.learning_rates import LearningRates
from ddpexp.train.plateau import Plateau, PlateauProgress
from ddpexp.train.torch_rates import TorchRates
from ddpexp.train.torch_schedule import MODULE, TorchSchedule
from tests.refusals import is_about, refused

STEPS = 30


def optimizer(**settings: Any) -> Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [torch.nn.Parameter(torch.ones(2))]},
        {"params": [torch.nn.Parameter()], "lr": 0.5},
    ]
    made: Optimizer = torch.optim.SGD(groups, lr=0.1, **settings)
    return made


def node(name: str, **settings: Any) -> dict[str, Any]:
    return {"_target_": f"{MODULE}{name}", **settings}


def halved(step: int) -> float:
    return 0.5**step


CASES: dict[str, tuple[Mapping[str, Any], Callable[[Optimizer], LRScheduler]]] = {
    "step": (node("StepLR", step_size=4), lambda o: torch.optim.lr_scheduler.StepLR(o, 4)),
    "restarts": (
        node("CosineAnnealingWarmRestarts", T_0=3, T_mult=2, eta_min=0.01),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2, 0.01),
    ),
    "milestones": (
        node("MultiStepLR", milestones=(3, 9)), lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 9]),
    ),
    "one cycle": (
        node("OneCycleLR", max_lr=(0.2, 0.4), total_steps=STEPS),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, [0.2, 0.4], total_steps=STEPS),
    ),
    "cyclic": (
        node("CyclicLR", base_lr=0.01, max_lr=0.3, step_size_up=4),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.3, step_size_up=4),
    ),
    "sequence": (
        node("SequentialLR", schedulers=(node("LinearLR", total_iters=5), node("ExponentialLR", gamma=0.9)),
            milestones=(5,)),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.LinearLR(o, total_iters=5), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
            [5],
        ),
    ),
    "chain": (
        node("ChainedScheduler", schedulers=(node("ConstantLR"), node("PolynomialLR", total_iters=20, power=2.0))),
        lambda o: torch.optim.lr_scheduler.ChainedScheduler(
            [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.PolynomialLR(o, 20, power=2.0)], o
        ),
    ),
    "function": (
        node("LambdaLR", lr_lambda={"_target_": f"{__name__}.halved", "_partial_": True}),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, halved),
    ),
}  # fmt: skip


def rates_of(made: Optimizer) -> list[list[float]]:
    return [[group["lr"], group.get("momentum", 0.0)] for group in made.param_groups]


def rates(schedule: Schedule, made: Optimizer, num_steps: int = STEPS) -> LearningRates:
    return LearningRates({"optimizer": made}, schedule, num_steps, 5)


def stored(state: Mapping[str, Any]) -> Any:
    """Return what a checkpoint makes of a state."""
    return decode(json.loads(json.dumps(encode(state, {}))), lambda name: torch.tensor(0))


@pytest.mark.parametrize("case", CASES)
def test_a_schedule_of_torchs_gives_its_rates_and_resumes_at_every_step(case: str) -> None:
    config, reference = CASES[case]
    settings = {"momentum": 0.9} if "cycl" in case else {}
    expected_of = optimizer(**settings)
    scheduler = reference(expected_of)
    expected = []
    for _ in range(STEPS):
        expected.append(rates_of(expected_of))
        expected_of.step()
        if len(expected) < STEPS:
            scheduler.step()
    schedule = TorchRates(TorchSchedule(schedule=config), Trust((__name__,)))
    undisturbed, states = optimizer(**settings), []
    through = rates(schedule, undisturbed)
    found = []
    for step in range(STEPS):
        states.append(stored(through.state()))
        through.set(step)
        found.append(rates_of(undisturbed))
    assert found == expected
    for first, state in enumerate(states):
        resumed = optimizer(**settings)
        again = rates(schedule, resumed)
        again.restore(state)
        for step in range(first, STEPS):
            again.set(step)
            assert rates_of(resumed) == expected[step], (first, step)


def test_a_schedule_of_torchs_follows_a_warm_up_and_may_step_once_an_epoch() -> None:
    config = TorchSchedule(warmup_steps=2, schedule=node("ExponentialLR", gamma=0.5), interval="epoch")
    made = optimizer()
    through = rates(TorchRates(config, Trust()), made)
    found = []
    for step in range(14):
        through.set(step)
        found.append(made.param_groups[0]["lr"])
    assert found == [0.05, *[0.1] * 6, *[0.05] * 5, *[0.025] * 2]
    assert through.recorded() == {"/0": 0.025, "/1": 0.125}


def test_the_settings_of_a_schedule_of_torchs_are_those_of_the_configuration() -> None:
    """And its state in a checkpoint is what the steps have made of it."""
    before = rates(TorchRates(TorchSchedule(schedule=node("StepLR", step_size=4)), Trust()), optimizer())
    before.set(6)
    state = before.state()
    assert set(state["state"]["optimizer"]["schedule"]) == {"last_epoch", "_step_count", "_last_lr"}
    made = optimizer()
    changed = rates(TorchRates(TorchSchedule(schedule=node("StepLR", step_size=7, gamma=0.5)), Trust()), made)
    changed.restore(stored(state))
    changed.set(7)
    assert made.param_groups[0]["lr"] == pytest.approx(0.005)


def test_a_schedule_of_torchs_that_ends_before_the_run_says_so() -> None:
    config = TorchSchedule(schedule=node("OneCycleLR", max_lr=1.0, total_steps=3, cycle_momentum=False))
    through = rates(TorchRates(config, Trust()), optimizer())
    with refused("scheduler.schedule", DdpexpError):
        through.set(5)


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        (node("OneCycleLR", max_lr=1.0), "scheduler.schedule._target_=torch.optim.lr_scheduler.OneCycleLR"),
        (node("StepLR", steps=3), "scheduler.schedule"),
    ],
)
def test_a_schedule_of_torchs_that_cannot_be_built_is_refused(schedule: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(RefusedError) as caught:
        rates(TorchRates(TorchSchedule(schedule=schedule), Trust()), optimizer())
    assert is_about(caught.value, sentence)


def follow(progress: PlateauProgress, values: list[float], every: int = 1) -> list[float]:
    """Return the factor after each evaluation."""
    found = []
    for number, value in enumerate(values, start=1):
        progress.observe({"eval/loss": value}, number * every, 1000)
        found.append(progress.factor(number * every, 1000))
    return found


VALUES = [5.0, 4.0, 4.5, 4.0, 3.9999, 3.0, 3.5, 3.5, 3.5, 3.5, 3.5, 3.5, 2.0, 2.5, 2.5, 2.5, 2.5, 2.5, 2.5, 2.5, 2.5]


@pytest.mark.parametrize(("patience", "cooldown", "delta"), [(1, 0, 0.0), (2, 0, 0.5), (2, 3, 0.0), (3, 1, 0.0)])
def test_plateau_reduces_as_torch_does(patience: int, cooldown: int, delta: float) -> None:
    made = torch.optim.SGD([torch.nn.Parameter()], lr=1.0)
    reference = ReduceLROnPlateau(
        made, factor=0.5, patience=patience - 1, cooldown=cooldown, threshold=delta, threshold_mode="abs", eps=0.0
    )
    expected = []
    for value in VALUES:
        reference.step(value)
        expected.append(made.param_groups[0]["lr"])
    progress = PlateauProgress(Plateau(gamma=0.5, patience=patience, cooldown=cooldown, min_delta=delta))
    assert follow(progress, VALUES) == expected


def test_plateau_resumes_after_every_evaluation() -> None:
    plateau = Plateau(gamma=0.5, patience=2, cooldown=1)
    expected = follow(PlateauProgress(plateau), VALUES)
    for first in range(len(VALUES)):
        before, after = (rates(PlateauProgress(plateau), optimizer()) for _ in range(2))
        for step, value in enumerate(VALUES[:first], start=1):
            before.observe({"eval/loss": value}, step)
        after.restore(stored(before.state()))
        for step, value in enumerate(VALUES[first:], start=first + 1):
            after.observe({"eval/loss": value}, step)
        after.set(STEPS)
        assert after.recorded() == {"/0": 0.1 * expected[-1], "/1": 0.5 * expected[-1]}


def test_plateau_stops_at_its_floor_counts_nan_as_no_improvement_and_ignores_the_warm_up() -> None:
    bad = [1.0, *[float("nan")] * 6]
    assert follow(PlateauProgress(Plateau(patience=1, gamma=0.1, floor=0.05)), bad) == [1.0, 0.1, *[0.05] * 5]
    warm = PlateauProgress(Plateau(patience=1, warmup_steps=30))
    found = follow(warm, [1.0, 2.0, 3.0, 4.0], every=10)
    assert found == [11 / 30, 21 / 30, 1.0, 0.1]
    highest = PlateauProgress(Plateau(mode="max", patience=1, monitor="eval/accuracy"))
    for step, value in enumerate([0.5, 0.6, 0.6]):
        highest.observe({"eval/accuracy": value}, step, 1000)
    assert highest.reductions == 1


def test_the_state_of_another_schedule_is_left_out_and_a_broken_one_refused() -> None:
    through = rates(PlateauProgress(Plateau()), optimizer())
    through.restore({})
    through.restore({"of": "torch", "state": {}})
    with refused("schedule"):
        through.restore({"of": "PlateauProgress", "state": {}})
    assert rates(Plateau(), optimizer()).state() == {}


class Mine:
    """A schedule of one's own with a state."""

    def __init__(self) -> None:
        self.seen = 0

    def factor(self, step: int, num_steps: int) -> float:
        return 0.5**self.seen

    def observe(self, metrics: Mapping[str, float], step: int, num_steps: int) -> None:
        self.seen += 1

    def state_dict(self) -> Mapping[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


def test_a_schedule_of_ones_own_may_have_a_state() -> None:
    assert isinstance(Mine(), StatefulSchedule)
    before, after = rates(Mine(), optimizer()), rates(Mine(), optimizer())
    before.observe({}, 1)
    after.restore(stored(before.state()))
    after.set(0)
    assert after.recorded() == {"/0": 0.05, "/1": 0.25}
