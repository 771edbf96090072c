"""The metric of trainer.keep_best is checked before training is lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpexp.errors import RefusedError
from ddpexp.train.keep_best import UnknownMetricError, check_set
from tests.conftest import Ddpexp
from tests.fitting import Kept, Once, fit_alone, loop_alone
from tests.points import Recipe
from tests.refusals import is_about


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Any:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("best"), environ)).module()


@pytest.fixture
def fit(points: Any, tmp_path: Path) -> Callable[..., Once]:
    return partial(fit_alone, points, tmp_path)


@pytest.mark.parametrize(
    ("keep_best", "sets", "sentence"),
    [
        ("max:val/accuracy", ["eval"], (
            "trainer.keep_best=max:val/accuracy"
        )),
        ("min:valid/loss", ["eval", "validation"], (
            "trainer.keep_best=min:valid/loss"
        )),
        ("min:eval/loss", [], (
            "trainer.keep_best=min:eval/loss"
        )),
    ],
)  # fmt: skip
def test_an_evaluation_set_that_does_not_exist_is_refused(keep_best: str, sets: list[str], sentence: str) -> None:
    with pytest.raises(RefusedError) as caught:
        check_set(keep_best, sets)
    assert is_about(caught.value, sentence)


def test_nothing_else_is_refused() -> None:
    check_set(None, [])
    check_set("max:eval/anything", ["eval"])


def test_an_unknown_metric_is_refused_after_the_first_step(points: Any, tmp_path: Path) -> None:
    loop, _ = loop_alone(points, tmp_path, points.Sides(), keep_best="max:eval/acc")
    with pytest.raises(RefusedError) as caught:
        loop.fit()
    assert is_about(caught.value, "trainer.keep_best=max")
    assert loop.progress.step == 1


def test_the_look_at_an_evaluation_changes_nothing(points: Any, fit: Callable[..., Once]) -> None:
    class Quiet(points.Sides):  # type: ignore[misc]
        calls = 0

        def step(self, model: Any, batch: Any) -> Any:
            self.calls += 1
            loss, count, metrics = super().step(model, batch)
            return loss * (1 + 0.1 * torch.rand(())), count, {} if model.training else metrics

    looked = fit(first := Quiet(), keep_best="max:eval/accuracy")
    alone = fit(second := Quiet(), keep_best="min:eval/loss")
    assert all(torch.equal(looked.weights[name], tensor) for name, tensor in alone.weights.items())
    assert first.calls == second.calls


def test_what_only_the_first_evaluation_shows_is_saved_before_the_run_fails(points: Any, tmp_path: Path) -> None:
    class Holds(points.Sides):  # type: ignore[misc]
        def __init__(self) -> None:
            self.held = object()  # of which a copy may share something: the task is not tried out

    loop, _ = loop_alone(points, tmp_path, Holds(), keep_best="max:eval/f1", eval_every=3)
    loop.checkpointer = saves = Kept()
    with pytest.raises(UnknownMetricError) as caught:
        loop.fit()
    assert is_about(caught.value, "trainer.keep_best=max")
    assert caught.value.override == "trainer.keep_best=min:eval/loss"
    assert saves.steps == [3]
