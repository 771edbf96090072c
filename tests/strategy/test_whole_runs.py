"""Whole runs of every strategy with all that happens beside the steps, also interrupted in the middle of an evaluation.

Evaluations with other numbers of batches on each rank, `on_eval`, callbacks, metrics, averages, the best checkpoint,
steps that are left out, the gradient scale of fp16, and clipping.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from tests.conftest import Ddpexp, Done
from tests.points import Recipe
from tests.records import timeless

CODE = """\
class Shows(Sides):
    # Calls the model after an evaluation, and may have a sample whose loss is not finite in training.
    def __init__(self, bad=-1):
        self.bad = bad

    def step(self, model, batch):
        loss, count, metrics = super().step(model, batch)
        if torch.is_grad_enabled() and (batch[0] == self.bad).any():
            loss = loss * torch.inf
        return loss, count, metrics

    def on_eval(self, model, batch, logger, step):
        loss = float(self.step(model, batch)[0])
        logger.scalars(step, 0.0, {"shown/loss": loss})
        print(f"shown by rank {RANK}: {loss:.6g}")


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
"""
COMMON = (
    "trainer.gpus=4", "trainer.threads=1", "trainer.micro_batch_size=6", "data.test=33", "task._target_=points.Shows",
    "optimizer=adamw", "trainer.log_every=1", "trainer.keep_best=min:eval/loss", "trainer.eval_every=2",
    "trainer.checkpoint_every=3", "trainer.clip_grad_norm=0.3", "logger=tensorboard",
    "callbacks=[histograms,lr_monitor,early_stopping]", "callbacks.histograms.every=3",
    "callbacks.early_stopping.patience=9",
)  # fmt: skip
AVERAGED = "trainer.ema_decay=0.9"
SKIPS = (AVERAGED, "trainer.nonfinite=skip", "+task.bad=41")
SCALED = (*SKIPS, "trainer.precision=fp16")
NORMED = (
    AVERAGED, "model._target_=points.Normed", "~model.hidden", "~model.dropout", "trainer.average_batch_norm=2",
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """A strategy, and whether its numbers are those of ddp to the bit, nearly so, or others."""

    overrides: tuple[str, ...]
    numbers: str = "same"


WAYS = {
    "fsdp": Way(("strategy=fsdp",)),
    "fsdp, evaluated together": Way(("strategy=fsdp", "strategy.gather_in_evaluation=false", "strategy.init=replay")),
    "hybrid": Way(("strategy=fsdp", "strategy.dp_replicate_size=2")),
    "shard_optimizer": Way(("strategy=ddp", "strategy.shard_optimizer=true")),
    "tensor": Way(
        (
            "strategy=fsdp", "strategy.tp_size=2",
            'strategy.tp_plan=[{match:["0"],style:colwise},{match:["3"],style:rowwise}]',
        ),
        "near",
    ),
    "pipeline": Way(("strategy=pipeline", "strategy.pp_size=2"), "near"),
    "local_sgd": Way(("strategy=local_sgd", "strategy.sync_every=3"), "other"),
    "diloco": Way(("strategy=diloco", "strategy.sync_every=3"), "other"),
}  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, warm_environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("whole"), warm_environ), CODE)


@pytest.fixture(scope="module")
def replicas(recipe: Recipe) -> dict[tuple[str, ...], Done]:
    """Runs of ddp with each set of options."""
    return {options: done(recipe(*COMMON, *options)) for options in (SKIPS, SCALED, NORMED)}


def done(ended: Done) -> Done:
    assert ended.code == 0, ended
    return ended


def records(ended: Done) -> list[dict[str, Any]]:
    """Return what a run has recorded, without times."""
    lines = [json.loads(line) for line in (ended.run / "metrics.jsonl").read_text().splitlines()]
    return [timeless(line) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(pytest.param(name, SKIPS, id=f"{name}, skips") for name in WAYS),
        *(pytest.param(name, SCALED, id=f"{name}, fp16") for name, way in WAYS.items() if way.numbers != "other"),
        *(pytest.param(name, NORMED, id=f"{name}, batch norm") for name, way in WAYS.items() if way.numbers == "same"),
    ],
)
def test_all_that_a_run_does_works_with_every_strategy(
    name: str, options: tuple[str, ...], recipe: Recipe, replicas: dict[tuple[str, ...], Done]
) -> None:
    way = WAYS[name]
    if way.numbers == "other":  # these are refused with it: see test_local.py
        options = ()
    whole = done(recipe(*COMMON, *options, *way.overrides, "trainer.profile=1:3"))
    assert len(list((whole.run / "profiles/step1").glob("rank*"))) == 2 * 4
    interrupted = recipe(*COMMON, *options, *way.overrides, environ={"DDPEXP_FAULT": "evaluate:term:1:2"})
    assert interrupted.code == 143, interrupted
    resumed = done(recipe(*COMMON, *options, *way.overrides, run=interrupted.run))
    assert resumed.result()["weights_sha256"] == whole.result()["weights_sha256"]
    found = records(whole)
    assert str(records(resumed)) == str(found)
    assert any("shown/loss" in line for line in found)
    assert "shown by rank 0" in (whole.run / "ranks/0.log").read_text()
    expected = records(replicas[options]) if options else []
    if way.numbers == "same":
        assert whole.result()["weights_sha256"] == replicas[options].result()["weights_sha256"]
        assert str(found) == str(expected)
    if way.numbers == "near":
        assert [list(line) for line in found] == [list(line) for line in expected]
        for mine, theirs in zip(found, expected, strict=True):
            numbers = [{key: value for key, value in line.items() if value is not None} for line in (mine, theirs)]
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-3, abs=1e-4), theirs["step"]
