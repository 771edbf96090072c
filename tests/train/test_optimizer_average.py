"""Optimizers that average the weights themselves: evaluated and saved with the average, trained without a trace of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.settings.node import Node
from ddpexp.train.average import WeightAverage
from ddpexp.train.optimizer_average import HasModes, OptimizerAverage, average_of, averages_itself
from tests.fitting import TRAINER, loop_alone
from tests.points import Recipe
from tests.refusals import refused


class Modal(torch.optim.SGD):
    """Trains weights ahead of their mean; `eval` gives the mean, with rounding, as schedule-free optimizers do."""

    def _switch(self, weight: float) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], weight)

    def train(self) -> None:
        if not self.param_groups[0].get("training", False):
            self._switch(0.1)
        for group in self.param_groups:
            group["training"] = True

    def eval(self) -> None:
        if self.param_groups[0].get("training", False):
            self._switch(1 - 1 / 0.9)
        for group in self.param_groups:
            group["training"] = False

    def step(self, closure: Any = None) -> Any:
        assert self.param_groups[0]["training"]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("z", parameter.detach().clone())
        super().step(closure)
        return None


def modal(parameters: Any) -> Optimizer:
    return Modal(parameters, lr=0.05, momentum=0.9)


def free(parameters: Any) -> Optimizer:
    made: Optimizer = importlib.import_module("schedulefree").AdamWScheduleFree(parameters, lr=0.05)
    return made


KINDS = [
    pytest.param(modal, id="ours"),
    pytest.param(free, id="schedulefree", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.conftest import Ddpexp

    return Recipe(Ddpexp(tmp_path_factory.mktemp("points"), {})).module()


def run(points: Any, folder: Path, make: Callable[[Any], Optimizer], **keys: Any) -> tuple[Any, OptimizerAverage]:
    """Train in this process."""
    loop, _ = loop_alone(points, folder, points.Sides(), 8, make=make, **keys)
    loop.fit()
    loop.logger.close()
    assert isinstance(loop.average, OptimizerAverage)
    return loop, loop.average


def weights(loop: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in loop.run.strategy.modules["model"].state_dict().items()}


@pytest.mark.parametrize("make", KINDS)
def test_evaluations_use_the_average_and_leave_no_trace_in_the_training(
    points: Any, tmp_path: Path, make: Callable[[Any], Optimizer]
) -> None:
    if make is free:
        pytest.importorskip("schedulefree")
    (often, average), (never, _) = (run(points, tmp_path, make, eval_every=every) for every in (1, 0))
    trained = weights(often)
    assert all(torch.equal(trained[name], tensor) for name, tensor in weights(never).items())
    average.refresh()
    assert all(torch.equal(trained[name], tensor) for name, tensor in weights(often).items())
    evaluated = {name: tensor.clone() for name, tensor in average.tensors("model").items()}
    assert not any(torch.equal(trained[name], tensor) for name, tensor in evaluated.items())
    optimizer: Any = often.run.optimizers["optimizer"]
    optimizer.eval()
    assert all(torch.equal(evaluated[name], tensor) for name, tensor in weights(often).items())
    model = often.run.strategy.modules["model"]
    _, rows, labels = points.points(33, 1).tensors
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(rows), labels)
    assert often.progress.metrics["eval/loss"] == pytest.approx(float(loss), rel=1e-5)


def test_it_is_computed_once_after_each_step_that_moves() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = Modal(model.parameters(), lr=0.1)
    calls: list[str] = []
    optimizer.eval = lambda: calls.append("eval")  # type: ignore[method-assign]
    average = OptimizerAverage({"model": model}, [optimizer], batch_norm=False)
    for moved in (True, False, True):
        average.update(1, moved)
        average.refresh()
        average.refresh()
    assert calls == ["eval"] * 2
    assert average.is_stale


def test_another_average_beside_it_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    optimizers: Mapping[str, Optimizer] = {"optimizer": Modal(model.parameters(), lr=0.1)}
    average = WeightAverage({"model": model}, decay=0.9)
    with refused("averages"):
        average_of(average, {"model": model}, optimizers, TRAINER)
    plain: Mapping[str, Optimizer] = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    assert average_of(average, {"model": model}, plain, TRAINER) is average
    assert average_of(None, {"model": model}, plain, TRAINER) is None
    with refused("trainer.average_batch_norm=3"):
        average_of(None, {"model": model}, plain, replace(TRAINER, average_batch_norm=3))


def test_evaluate_knows_of_it_by_the_class(tmp_path: Path) -> None:
    assert issubclass(Modal, HasModes)
    assert not issubclass(torch.optim.SGD, HasModes)
    made = compose(["recipe=mnist", f"run.trust=[{__name__}]"])
    assert made is not None
    experiment = parse(made.values)
    for target, expected in (("torch.optim.SGD", False), ("muon", False), (f"{__name__}.Modal", True)):
        assert averages_itself(replace(experiment, optimizer=Node(target)), tmp_path) == expected
    gone = replace(experiment, optimizer=Node("tests.train.gone.Modal"))
    assert not averages_itself(gone, tmp_path)
    (tmp_path / "model.ema.safetensors").touch()
    assert averages_itself(gone, tmp_path)
