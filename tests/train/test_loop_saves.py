"""When the loop saves, and what it refuses to keep.

Real commands of one worker, whose tasks say how well they are at each step.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from ddpexp.checkpoint.format import complete_checkpoints, open_checkpoint
from ddpexp.data.order import Permutation
from tests.conftest import Ddpexp, finish
from tests.points import Recipe

CODE = """\
class Scored(Sides):
    # Its score after each step is what the test has chosen.
    def __init__(self, scores):
        self.scores, self.done = [float(score) for score in scores.split()], 0

    def step(self, model, batch):
        loss, count, _ = super().step(model, batch)
        self.done += model.training
        return loss, count, {"score": (torch.tensor(count * self.scores[self.done - 1]), count)}


class Opaque(Sides):
    # Holds what cannot be copied, so that no step is tried out.
    def __init__(self):
        self.held = object()


class Broken(Sides):
    # A sample that makes the loss not a number.
    def __init__(self, index):
        self.index = index

    def step(self, model, batch):
        loss, count, metrics = super().step(model, batch)
        return (loss * float("nan") if model.training and (batch[0] == self.index).any() else loss), count, metrics
"""


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What a run saves is tested, not how a rank starts."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("saves"), environ), CODE)


def checkpoints(run: Path) -> list[Path]:
    return sorted(complete_checkpoints(run / "checkpoints"))


def steps(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoints(run)]


@pytest.mark.parametrize(("mode", "last", "kept"), [("max", "null", [1, 2, 5, 7]), ("min", "1", [3, 7])])
def test_an_evaluation_that_is_better_than_all_before_is_saved_though_no_save_is_due(
    recipe: Recipe, mode: str, last: str, kept: list[int]
) -> None:
    done = recipe(
        "task._target_=points.Scored", "+task.scores='4 5 3 5 9 nan 6'", "trainer.eval_every=1",
        "trainer.checkpoint_every=0",
        "trainer.max_steps=7", f"trainer.keep_last={last}", f"trainer.keep_best={mode}:eval/score",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert steps(done.run) == kept  # an equal one is not better, and the end is always saved


def test_a_run_whose_metric_does_not_exist_is_saved_and_its_last_line_resumes_it(recipe: Recipe) -> None:
    done = recipe("task._target_=points.Opaque", "trainer.eval_every=5", "trainer.keep_best=max:eval/acc")
    assert done.code == 1
    assert steps(done.run)[-1] == 5
    before, command = done.err.strip().rsplit(": python -m ddpexp ", 1)
    assert "trainer.keep_best=max:eval/acc " in before
    assert "eval/loss, eval/accuracy" in before
    words = shlex.split(command)
    assert words[-1] == "trainer.keep_best=max:eval/accuracy"
    process, _ = recipe.ddpexp.start(*words)
    again = finish(process, done.run)
    assert again.code == 0, again.err
    assert "resumed after step 5 of" in again.out


def test_a_checkpoint_after_a_bad_step_is_refused_with_the_number_of_that_step(recipe: Recipe) -> None:
    index = int(Permutation(96, 0, 0)(np.arange(96))[24])  # the first sample of step 2
    done = recipe(
        "task._target_=points.Broken", f"+task.index={index}", "trainer.checkpoint_every=3", "trainer.log_every=100",
        "trainer.eval_every=0",
    )  # fmt: skip
    assert done.code == 1
    assert "NonFiniteError: train/loss is nan at step 2: " in done.err
    assert steps(done.run) == []


def test_an_ema_that_is_enabled_later_begins_with_the_weights_of_the_checkpoint(recipe: Recipe) -> None:
    overrides = (
        "task._target_=points.Sides",
        "trainer.checkpoint_every=1",
        "trainer.keep_last=null",
        "trainer.log_every=1",
    )
    first = recipe(*overrides, "trainer.max_steps=4")
    assert first.code == 0, first.err
    done = recipe(*overrides, "trainer.max_steps=5", "trainer.ema_decay=0.99999", run=first.run)
    assert done.code == 0, done.err
    recorded = [open_checkpoint(path).manifest["records"]["metrics.jsonl"] for path in checkpoints(first.run)]
    assert recorded == sorted(set(recorded))  # each has more lines than the one before
    then, since = (load_file(first.run / f"checkpoints/step-0000000{number}/model.safetensors") for number in (4, 5))
    average = load_file(first.run / "checkpoints/step-00000005/model.ema.safetensors")
    for name, value in then.items():
        assert (average[name] - value).abs().max() < 1e-5
        assert (since[name] - value).abs().max() > 1e-4  # the comparison can fail
    assert json.loads((first.run / "result.json").read_text())["step"] == 5
