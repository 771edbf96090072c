"""The evaluation set named `test`: evaluated at the end of a run only, and nothing is chosen by it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpexp.config.build import build as build_section
from ddpexp.launch.workers.control import Control
from ddpexp.settings.metrics import check_not_test
from ddpexp.settings.run import SweepSettings
from ddpexp.train.callbacks.hooks import Callbacks
from ddpexp.train.evaluate import chosen_sets
from ddpexp.train.loop import Loop
from ddpexp.train.metrics import MetricError
from tests.conftest import Ddpexp
from tests.fitting import Kept, loop_alone, restore
from tests.points import Recipe
from tests.refusals import refused

CODE = """
def load_tested(train=96, test=33):
    return Splits(points(train, 0), {"eval": points(test, 1), "test": points(test, 2)})


class Normed(nn.Sequential):
    def __init__(self, hidden=8, dropout=0.0):
        super().__init__(nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 2))
"""


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What is evaluated is tested, not how fork servers start."""
    return warm_environ


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Any:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("test_set"), environ)).module()


@dataclass
class Task:
    """A task with a perplexity, whose first failing evaluations fail in `finish`."""

    failing: int = 0
    shown: list[int] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def step(self, model: Any, batch: Any) -> Any:
        scores = model(batch[1])
        return nn.functional.cross_entropy(scores, batch[2], reduction="sum"), len(scores), {}

    def finish(self, sums: Mapping[str, Any]) -> Mapping[str, float]:
        self.failing -= 1
        self.calls.append("finish")
        total, count = sums["loss"]
        return {"perplexity": math.exp(total / count)} if self.failing < 0 else {"perplexity": sums["nothing"]}

    def on_eval(self, model: Any, batch: Any, logger: Any, step: int) -> None:
        self.shown.append(len(batch[0]))
        self.calls.append("on_eval")


class Stops(Control):
    """A stop request that comes while the n-th set is evaluated."""

    def __init__(self, during: int) -> None:
        super().__init__(None)
        self.left = during

    @property
    def stop_requested(self) -> bool:
        self.left -= 1
        return self.left == 0


def build(points: Any, folder: Path, sets: Sequence[str] = ("test", "eval"), task: Any = None, **keys: Any) -> Loop:
    evals = {name: points.points({"test": 20, "eval": 33}[name], 1) for name in sets}
    loop, _ = loop_alone(points, folder, task or Task(), evals=evals, global_batch_size=48, **keys)
    loop.checkpointer = Kept()
    return loop


def records(folder: Path, prefix: str) -> list[int]:
    """Return the steps at which metrics of that prefix are recorded."""
    lines = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [line["step"] for line in lines if any(key.startswith(prefix) for key in line)]


def test_the_test_set_is_evaluated_once_with_the_weights_of_the_end(points: Any, tmp_path: Path) -> None:
    task = Task()
    loop = build(points, tmp_path, task=task, eval_every=2)
    outcome = loop.fit()
    assert (records(tmp_path, "eval/"), records(tmp_path, "test/")) == ([2, 4, 6, 8], [8])
    assert set(outcome.metrics) == {"eval/loss", "eval/perplexity", "test/loss", "test/perplexity"}
    assert outcome.metrics["test/perplexity"] == math.exp(outcome.metrics["test/loss"])
    assert task.shown == [33] * 4
    assert task.calls == [*["finish", "on_eval"] * 4, "finish"], "what is shown may be what `finish` has computed"
    with torch.no_grad():
        loss, count, _ = task.step(loop.run.strategy.eval_model, points.points(20, 1).tensors)
    assert outcome.metrics["test/loss"] == pytest.approx(float(loss) / count, rel=1e-5)


def test_the_average_of_the_weights_is_evaluated(points: Any, tmp_path: Path) -> None:
    metrics = [build(points, tmp_path, ema_decay=decay).fit().metrics for decay in (None, 0.9)]
    assert all(values["test/perplexity"] == math.exp(values["test/loss"]) for values in metrics)
    assert metrics[0]["test/perplexity"] != metrics[1]["test/perplexity"]


def test_without_evaluations_the_test_set_is_not_evaluated_either(points: Any, tmp_path: Path) -> None:
    assert build(points, tmp_path, eval_every=0).fit().metrics == {}


def test_a_test_set_alone_is_evaluated_at_the_end(points: Any, tmp_path: Path) -> None:
    task = Task()
    outcome = build(points, tmp_path, ["test"], task, eval_every=2).fit()
    assert (records(tmp_path, "test/"), task.shown) == ([8], [20])
    assert set(outcome.metrics) == {"test/loss", "test/perplexity"}


def test_a_run_that_ends_early_has_its_test_set_evaluated(points: Any, tmp_path: Path) -> None:
    build(points, tmp_path, callbacks=Callbacks(stopped="enough")).fit()
    assert records(tmp_path, "test/") == [0]


@pytest.mark.parametrize("keep_best", [None, "min:eval/loss"])
@pytest.mark.parametrize("during", [1, 2])
def test_an_interruption_leaves_what_it_interrupted_to_the_resume(
    points: Any, tmp_path: Path, during: int, keep_best: str | None
) -> None:
    control = Stops(during)  # a batch of eval, then one of test
    loop = build(points, tmp_path, control=control, eval_every=8, keep_best=keep_best)
    assert loop.fit().interrupted
    again = build(points, tmp_path, eval_every=8, keep_best=keep_best)
    assert isinstance(loop.checkpointer, Kept)
    restore(again, loop.checkpointer.saved[-1])
    outcome = again.fit()
    assert not outcome.interrupted
    assert (records(tmp_path, "eval/"), records(tmp_path, "test/")) == ([8], [8])
    assert set(outcome.metrics) == {"eval/loss", "eval/perplexity", "test/loss", "test/perplexity"}


def test_a_run_that_is_done_is_not_evaluated_again(points: Any, tmp_path: Path) -> None:
    loop = build(points, tmp_path)
    loop.fit()
    again = build(points, tmp_path)
    assert isinstance(loop.checkpointer, Kept)
    restore(again, loop.checkpointer.saved[-1])
    again.fit()
    assert records(tmp_path, "test/") == [8]


@pytest.mark.parametrize("failing", [2, 3])
def test_a_metric_that_cannot_be_computed_loses_no_step(points: Any, tmp_path: Path, failing: int) -> None:
    """The first call is the one that tries the metrics out after the first step of a start."""
    loop = build(points, tmp_path, task=Task(failing), eval_every=4)
    loop.run.task.failing = failing  # type: ignore[attr-defined]
    with refused(": raised", MetricError):
        loop.fit()
    assert isinstance(loop.checkpointer, Kept)
    saved = loop.checkpointer.saved[-1]
    assert (saved["progress"]["step"], saved["progress"]["evaluated"]) == (4, False)
    again = build(points, tmp_path, eval_every=4)
    restore(again, saved)
    again.fit()
    assert records(tmp_path, "eval/") == [4, 8]


@pytest.mark.parametrize("metric", ["test/accuracy", "test"])
def test_nothing_is_chosen_by_the_test_set(metric: str) -> None:
    with refused(f"sweep.objective={metric}"):
        build_section(SweepSettings, {"objective": metric}, "sweep")
    with refused("trainer.keep_best=max:x"):
        check_not_test("trainer.keep_best", "max:x", metric)


def test_without_a_split_all_sets_but_test_are_evaluated() -> None:
    sets = {"eval": 1, "test": 2, "shifted": 3}
    assert chosen_sets(sets, []) == {"eval": 1, "shifted": 3}
    assert chosen_sets(sets, ["test"]) == {"test": 2}
    assert list(chosen_sets(sets, ["test", "eval"])) == ["test", "eval"]
    assert chosen_sets({}, []) == {}


@pytest.mark.parametrize(
    ("sets", "split", "message"),
    [
        (
            ["eval", "test"],
            ["tset"],
            "--split tset",
        ),
        (["eval", "test"], ["xyz"], "--split xyz"),
        ([], ["test"], "--split test"),
        (["eval"], ["test"], "--split test: data.test_set=eval"),
        (["test"], [], "split"),
    ],
)
def test_a_split_that_is_not_there_is_refused(sets: list[str], split: list[str], message: str) -> None:
    with refused(message):
        chosen_sets(dict.fromkeys(sets), split)


def test_what_is_tested_can_be_chosen_and_is_said(
    points: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = []
    for keys in ({}, {"keep_best": "min:eval/loss"}, {"keep_best": "min:eval/loss", "test_weights": "last"}):
        caplog.clear()
        caplog.set_level("INFO", "ddpexp")
        assert build(points, tmp_path, **keys).fit().tested == 8
        said.append(next(text for text in caplog.messages if text.startswith("testing")))
    assert said == [
        "testing the weights of step 8, the last ones",
        "testing the weights of step 8, the best by trainer.keep_best=min:eval/loss",
        "testing the weights of step 8, the last ones",
    ]


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (
            ("model._target_=points.Normed", "trainer.ema_decay=0.9", "trainer.average_batch_norm=1"),
            "evaluate:kill:0:9",
        ),
        (("strategy=fsdp", "model.hidden=16"), "checkpoint.replaced:kill:0:1"),
    ],
)
def test_the_best_weights_are_tested_whatever_happens_meanwhile(
    ddpexp: Ddpexp, overrides: tuple[str, ...], fault: str
) -> None:
    recipe = Recipe(ddpexp, CODE)
    typed = (
        "data._target_=points.load_tested", "trainer.eval_every=2", "trainer.keep_best=max:eval/loss",
        "trainer.micro_batch_size=12", "trainer.gpus=2", *overrides,
    )  # fmt: skip
    killed = recipe(*typed, environ={"DDPEXP_FAULT": fault})
    assert killed.code == 1, killed.err
    done = recipe(*typed, run=killed.run)
    assert done.code == 0, done.err
    assert "resumed after step 8 of 8" in done.out
    assert "testing the weights of step 2, the best by trainer.keep_best=max:eval/loss" in done.out
    result = json.loads((done.run / "result.json").read_text())
    assert (result["tested_step"], result["best"]["step"], result["step"]) == (2, 2, 8)
    config = ["--config-dir", str(recipe.folder / "conf")]
    again = ddpexp("evaluate", str(done.run), *config, "--checkpoint", "best", "--split", "test", "--json")
    tested = {name: value for name, value in result["metrics"].items() if name.startswith("test/")}
    assert tested == json.loads(again.out)["metrics"]
    assert records(done.run, "test/") == [8]
