"""Local SGD and DiLoCo: against loops by hand, and through interruptions."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpexp.launch import Layout
from ddpexp.strategy.estimator import Facts, Parameter
from ddpexp.strategy.local.estimator import DiLoCoEstimator, LocalEstimator
from ddpexp.strategy.local.options import DiLoCoOptions, LocalOptions
from tests.conftest import Ddpexp
from tests.fitting import TRAINER, asked
from tests.points import Recipe
from tests.refusals import command_refused, refused
from tests.strategy.on_ranks import works

OPTIONS = LocalOptions("local_sgd", 10, 0)
OUTER = DiLoCoOptions("diloco", 10, 0, 0.7, 0.9)


@pytest.mark.variants(1)
@pytest.mark.parametrize("case", ["equal", "buffers", "norms"])
def test_ranks_train_to_the_weights_of_a_loop_by_hand(case: str, tmp_path: Path, forked_servers: None) -> None:
    works("tests.strategy.local", case, 3, tmp_path / "logs")


@pytest.mark.parametrize(
    ("options", "trainer", "expected"),
    [
        (OPTIONS, {"reduction": "exact"}, "trainer.reduction=exact: strategy=local_sgd"),
        (OPTIONS, {"precision": "fp16"}, "strategy=local_sgd: trainer.precision=fp16"),
        (OUTER, {"nonfinite": "skip"}, "strategy=diloco: trainer.nonfinite=skip"),
        (OPTIONS, {"ema_decay": 0.9}, "strategy=local_sgd: trainer.ema_decay and trainer.swa_start"),
        (OPTIONS, {"param_dtype": "bf16"}, "strategy=local_sgd: trainer.param_dtype=bf16"),
    ],
)
def test_what_needs_equal_weights_in_every_step_is_refused(
    options: LocalOptions, trainer: dict[str, object], expected: str
) -> None:
    with refused(expected):
        options.check(asked(**trainer))


def test_the_plan_spreads_the_messages_over_a_round_and_counts_the_outer_optimizer() -> None:
    facts = Facts([Parameter("model", 1000, 4000, "fp32", True)], 0, {"model": 4000}, 8000, None, None, None, 100)
    layout = Layout(1, 4, "cpu", "gloo", 1)
    inner, outer = LocalEstimator(OPTIONS), DiLoCoEstimator(OUTER)
    assert inner.traffic(facts, TRAINER, layout).num_bytes == [400]
    assert [part.num_bytes for part in inner.memory(facts, TRAINER, layout)] == [4000, 4000, 8000]
    assert [part.num_bytes for part in outer.memory(facts, TRAINER, layout)] == [4000, 4000, 8000, 8000]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, warm_environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("local"), warm_environ))


COMMON = ("optimizer=adamw", "trainer.gpus=2", "trainer.max_steps=8", "trainer.clip_grad_norm=1", "trainer.log_every=2")
DILOCO = ("strategy=diloco", "strategy.sync_every=3")


@pytest.mark.slow
def test_a_run_that_is_killed_within_a_round_ends_with_the_same_weights(recipe: Recipe) -> None:
    whole = recipe(*COMMON, *DILOCO)
    assert whole.code == 0, whole.err
    overrides = (*COMMON, *DILOCO, "trainer.checkpoint_every=1")
    killed = recipe(*overrides, environ={"DDPEXP_FAULT": "step:kill:1:6"})  # the checkpoint of step 4 or 5 is there
    assert killed.code == 1
    done = recipe(*overrides, run=killed.run)
    assert "resumed after step" in done.out
    assert done.result()["weights_sha256"] == whole.result()["weights_sha256"]
    assert done.result()["metrics"] == whole.result()["metrics"]


@pytest.mark.slow
def test_another_number_of_workers_and_another_strategy_resume_from_the_mean(recipe: Recipe) -> None:
    begun = recipe(*COMMON, *DILOCO, "trainer.max_steps=4")
    other = recipe(*COMMON, *DILOCO, "trainer.gpus=3", "trainer.max_steps=6", run=begun.run)
    assert "the checkpoint was made by 2 workers" in other.out + other.err
    local = recipe(*COMMON, "strategy=local_sgd", "trainer.gpus=3", "trainer.max_steps=7", run=begun.run)
    assert "all start with what they had in common there" in local.out + local.err
    last = recipe(*COMMON, "strategy=ddp", "trainer.gpus=3", run=begun.run)
    for done in (begun, other, local, last):
        assert done.code == 0, done.err
    assert "all start with what they had in common there" in last.out + last.err


def test_a_task_that_does_a_step_itself_is_refused(recipe: Recipe) -> None:
    folder = recipe.folder / "points.py"
    code = folder.read_text()
    folder.write_text(f"{code}\n\nclass Own(Sides):\n    def train_step(self, update, batches):\n        ...\n")
    done = recipe("task._target_=points.Own", "strategy=local_sgd")
    folder.write_text(code)
    command_refused(done, "strategy=local_sgd: train_step", out=None)
