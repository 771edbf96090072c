"""The progress of a run, for a step that asks for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ddpexp.train.task_step import CurrentProgress, step_of
from tests.conftest import Ddpexp
from tests.fitting import Once, fit_alone, manual, near
from tests.points import Recipe, weights

CODE = """\
class Anneals(Sides):
    # A second loss that comes in over the first half of the run, as the divergence of a variational autoencoder.
    def step(self, model, batch, progress):
        loss, count, metrics = super().step(model, batch)
        weight = 2 * progress.fraction
        weight = weight.clamp(max=1.0) if isinstance(weight, torch.Tensor) else min(1.0, weight)
        seen = progress.step + 1000 * progress.num_steps + 1e6 * progress.epoch
        return loss + weight * model(batch[1]).square().sum(), count, {"seen": (seen * torch.ones(()), 1)}


class ByHand(Anneals):
    def train_step(self, update, batches):
        sums = update.backward(batches)
        update.apply()
        return sums
"""
ANNEALS = ("task._target_=points.Anneals", "scheduler=cosine", "trainer.log_every=1", "optimizer.lr=0.05",
           "optimizer.momentum=0.9", "optimizer.nesterov=true")  # fmt: skip


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What a step gets is tested, not how a rank starts."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("progress"), environ), CODE)


@pytest.fixture(scope="module")
def points(recipe: Recipe) -> Any:
    return recipe.module()


@pytest.fixture
def fit(points: Any, tmp_path: Path) -> Callable[..., Once]:
    return partial(fit_alone, points, tmp_path)


def expected(points: Any) -> dict[str, Tensor]:
    """The weights of a plain program."""
    step = iter(range(8))

    def loss(model: Any, batch: Any) -> Tensor:
        scores = model(batch[1])
        each: Tensor = cross_entropy(scores, batch[2], reduction="sum")
        each = each + min(1.0, 2 * next(step) / 8) * scores.square().sum()
        return each / 24

    return manual(points, loss=loss)[0]


@pytest.mark.parametrize("kind", ["Anneals", "ByHand"])
def test_a_step_that_asks_for_it_gets_the_progress_of_the_run(points: Any, fit: Callable[..., Once], kind: str) -> None:
    once = fit(getattr(points, kind)(), log_every=1, micro_batch_size=6)
    assert near(once.weights, expected(points), 1e-6)
    assert not near(once.weights, manual(points)[0], 1e-3)  # the comparison can fail
    seen = [record["train/seen"] for record in once.records if "train/seen" in record]
    assert seen == pytest.approx([step + 8000 + 1e6 * step / 4 for step in range(8)])
    assert once.loop.progress.metrics["eval/seen"] == pytest.approx(7 + 8000 + 1e6 * 7 / 4)  # of the last step


def test_a_resumed_run_and_an_evaluation_of_its_weights_go_on_with_the_same_progress(
    points: Any, recipe: Recipe
) -> None:
    keys = (*ANNEALS, "trainer.gpus=2", "trainer.checkpoint_every=3")
    killed = recipe(*keys, environ={"DDPEXP_FAULT": "step:kill:1:6"})
    assert killed.code not in (0, 2), killed.err
    whole = recipe(*keys, run=killed.run)
    assert whole.code == 0, whole.err
    assert near(weights(whole), expected(points), 1e-5)
    folder = str(recipe.folder / "conf")
    done = recipe.ddpexp("evaluate", str(whole.run), "--config-dir", folder, "--checkpoint", "last", "--json")
    assert done.code == 0, done.err
    metrics = json.loads((whole.run / "result.json").read_text())["metrics"]
    assert json.loads(done.out)["metrics"] == pytest.approx(metrics, rel=1e-6)


def test_a_compiled_model_gets_tensors() -> None:
    class Asks:
        def step(self, model: Any, batch: Any, progress: Any) -> Any:
            return progress

    current = CurrentProgress(8, 4, torch.device("cpu"))
    current.set(6)
    asks: Any = Asks()
    progress = step_of(asks, current)(None, None)
    assert [progress.step, progress.num_steps, progress.epoch, progress.fraction] == [6, 8, 1.5, 0.75]
    assert all(isinstance(value, Tensor) for value in vars(progress).values())
