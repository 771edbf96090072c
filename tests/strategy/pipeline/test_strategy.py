"""Pipeline parallelism: against one process, through interruptions, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.strategy.memory import Facts, Parameter
from ddpexp.strategy.options import DataRank
from ddpexp.strategy.pipeline.options import PipelineOptions
from tests.conftest import Ddpexp, Done
from tests.fitting import TRAINER
from tests.points import Recipe, weights

OPTIONS = PipelineOptions("pipeline", 2, None, "1f1b")


def test_neighbours_share_a_stage_and_the_last_stage_reports() -> None:
    ranks = [OPTIONS.data_rank(rank, 4) for rank in range(4)]
    assert ranks == [DataRank(0, 2, False), DataRank(1, 2, False), DataRank(0, 2), DataRank(1, 2)]
    assert [OPTIONS.stage_of(rank, 4) for rank in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("options", "trainer", "sentence"),
    [
        ({"pp_size": 1}, {}, "strategy.pp_size=1: use 2 or more stages, or strategy=ddp."),
        ({"split_before": ("a", "b")}, {}, "strategy.pp_size=2 stages all but the first begin with one: name 1."),
        ({}, {"reduction": "exact"}, "trainer.reduction=exact is incompatible with strategy=pipeline"),
        ({}, {"compile": True}, "strategy=pipeline is incompatible with trainer.compile=true"),
        ({}, {"param_dtype": "bf16"}, "Use trainer.param_dtype=fp32 trainer.precision=bf16."),
        ({}, {"average_batch_norm": 3, "ema_decay": 0.9}, "incompatible with trainer.average_batch_norm=3"),
    ],
)
def test_what_a_stage_does_not_support_is_refused(
    options: dict[str, Any], trainer: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RefusedError, match=re.escape(sentence)):
        replace(OPTIONS, **options).check(replace(TRAINER, **trainer))


@pytest.mark.parametrize(
    ("size", "world_size", "micro_batches", "sentence"),
    [
        (2, 3, 4, "strategy.pp_size=2 does not divide 3 workers: use 3."),
        (4, 6, 4, "strategy.pp_size=4 does not divide 6 workers: use 2 or 3 or 6."),
        (2, 1, 4, "does not divide 1 worker: use trainer.gpus=2, or strategy=ddp."),
        (2, 4, 1, "there is 1: use a smaller trainer.micro_batch_size, at most trainer.global_batch_size / 4."),
    ],
)
def test_sizes_that_do_not_divide_are_refused(size: int, world_size: int, micro_batches: int, sentence: str) -> None:
    layout = Layout(1, world_size, "cpu", "gloo", 1)
    with pytest.raises(RefusedError, match=re.escape(sentence)):
        replace(OPTIONS, pp_size=size).check_layout(TRAINER, layout, micro_batches)


def test_the_plan_counts_the_largest_stage() -> None:
    parameters = [Parameter("model", 100, 400, "fp32", True), Parameter("model", 200, 800, "fp32", True)]
    facts = Facts(parameters, 0, {"model": 1200}, 2400, 1000, None, None, 100, num_passes=6, blocks_bytes=[400, 800])
    layout = Layout(1, 2, "cpu", "gloo", 1)
    assert [part.num_bytes for part in OPTIONS.memory(facts, TRAINER, layout)] == [800, 800, 1600]
    gpipe = replace(OPTIONS, schedule="gpipe")
    assert [part.num_bytes for part in gpipe.memory(facts, TRAINER, layout)] == [800, 800, 1600, 2000]
    assert OPTIONS.moments(facts, TRAINER, layout) == {"start": 1200, "evaluation": 2800}
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2), nn.Tanh())
    assert OPTIONS.blocks_bytes({"model": model}) == [160, 72]
    assert replace(OPTIONS, split_before=(1,)).blocks_bytes({"model": model}) == [160, 72]


CODE = """\
class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        )


class Padded(Sides):
    # Counts only some of the samples, so that a count is a tensor.
    def step(self, model, batch):
        _, rows, labels = batch
        loss = nn.functional.cross_entropy(model(rows), labels, reduction="none")
        counted = rows[:, 0] > 0
        return (loss * counted).sum(), counted.sum(), {}


class Twice(Sides):
    def step(self, model, batch):
        model(batch[1])
        return super().step(model, batch)


class Without(Sides):
    def step(self, model, batch):
        return torch.zeros((), requires_grad=True), len(batch[1]), {}


class Varying(Net):
    def __init__(self, hidden=8, dropout=0.0):
        super().__init__(hidden, dropout)
        self.insert(1, Shrinking())


class Shrinking(nn.Module):
    calls = 0

    def forward(self, x):
        Shrinking.calls += 1
        return x[: len(x) - Shrinking.calls // 4] if self.training else x
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, warm_environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("pipeline"), warm_environ), CODE)


COMMON = ("optimizer=adamw", "trainer.clip_grad_norm=0.2", "trainer.threads=1", "trainer.log_every=1")
ONE = ("trainer.gpus=1", "trainer.micro_batch_size=6")
PIPELINE = ("strategy=pipeline", "trainer.gpus=2", "trainer.micro_batch_size=6")


def records(done: Done) -> list[dict[str, float]]:
    """Return what was logged, without times."""
    lines = [json.loads(line) for line in (done.run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time" and "per_second" not in key} for line in lines]


def same(one: Done, other: Done) -> None:
    for done in (one, other):
        assert done.code == 0, done.err
    assert one.result()["weights_sha256"] == other.result()["weights_sha256"]
    assert records(one) == records(other)


NORMED = ("model._target_=points.Normed", "~model.hidden", "~model.dropout")
AVERAGED = ("trainer.ema_decay=0.9", "task._target_=points.Padded", "trainer.nonfinite=skip", "trainer.precision=bf16")


@pytest.mark.parametrize("extra", [(), NORMED, AVERAGED], ids=["plain", "normed", "averaged"])
def test_the_weights_and_records_are_those_of_one_process(recipe: Recipe, extra: tuple[str, ...]) -> None:
    one = recipe(*COMMON, *ONE, *extra)
    same(one, recipe(*COMMON, *PIPELINE, *extra))
    if not extra:
        three = ("strategy.pp_size=3", "trainer.gpus=3", "strategy.schedule=gpipe", "strategy.split_before=[2,3]")
        same(one, recipe(*COMMON, *PIPELINE, *three, "trainer.micro_batch_size=6"))


def test_copies_of_stages_share_the_data_as_the_workers_of_ddp(recipe: Recipe) -> None:
    same(
        recipe(*COMMON, *NORMED, "strategy=ddp", "trainer.gpus=2", "trainer.micro_batch_size=3"),
        recipe(*COMMON, *NORMED, *PIPELINE, "trainer.gpus=4", "trainer.micro_batch_size=3"),
    )


def test_a_killed_run_resumes_as_a_pipeline_and_another_strategy_resumes_from_it(recipe: Recipe) -> None:
    options = (*COMMON, *PIPELINE, "model.dropout=0.2", "trainer.checkpoint_every=1")
    whole = recipe(*options)
    killed = recipe(*options, environ={"DDPEXP_FAULT": "backward:kill:0:22"})
    assert killed.code == 1
    assert "rank 0 on" in killed.err
    assert "SIGKILL" in killed.err
    done = recipe(*options, run=killed.run)
    assert "resumed after step" in done.out
    same(whole, done)
    again = (*COMMON, "trainer.epochs=null")
    one = recipe(*again, *ONE, "trainer.max_steps=9")
    begun = recipe(*again, *PIPELINE, "trainer.max_steps=3")
    recipe(*again, *ONE, "strategy=ddp", "trainer.max_steps=6", run=begun.run)
    last = recipe(*again, *PIPELINE, "trainer.max_steps=9", run=begun.run)
    assert last.code == 0, last.err
    assert last.result()["weights_sha256"] == one.result()["weights_sha256"]


@pytest.mark.parametrize(("fault", "rank"), [("backward:sleep:0:6", 0), ("forward:sleep:1:6", 1)])
def test_a_stage_that_hangs_is_named_and_not_the_one_that_waits_for_it(recipe: Recipe, fault: str, rank: int) -> None:
    options = (*COMMON, *PIPELINE, "trainer.timeout.step_seconds=2")
    done = recipe(*options, environ={"DDPEXP_FAULT": fault})
    assert done.code == 1
    assert f"ddpexp: rank {rank} on" in done.err
    assert "Hang: no progress" in done.err


@pytest.mark.parametrize(
    ("task", "model", "sentence"),
    [
        ("Twice", "Net", "the task's step calls the model twice in a micro-batch"),
        ("Without", "Net", "the task's step returned without calling the model"),
        (
            "Sides",
            "Varying",
            "a tensor of shape [5, 8] in float32, and a tensor of shape [6, 8] in float32 for a batch",
        ),
    ],
)
def test_what_stages_cannot_pass_on_ends_the_run_with_a_message(
    recipe: Recipe, task: str, model: str, sentence: str
) -> None:
    done = recipe(*COMMON, *PIPELINE, f"task._target_=points.{task}", f"model._target_=points.{model}")
    assert done.code == 1
    assert sentence in done.err


def test_an_optimizer_of_whole_matrices_is_refused(recipe: Recipe) -> None:
    done = recipe(*ONE, "strategy=pipeline", "optimizer=muon")
    assert done.code == 2
    assert "with strategy=pipeline a worker has only the parameters of its stage" in done.err


def test_a_check_with_one_worker_is_refused(recipe: Recipe) -> None:
    words, _ = recipe.words(*PIPELINE)
    done = recipe.ddpexp("check", *words)
    assert done.code == 2
    assert "check the other overrides with strategy=ddp" in done.err


def test_a_tied_embedding_is_trained_on_two_stages(
    tmp_path_factory: pytest.TempPathFactory, warm_environ: dict[str, str]
) -> None:
    folder = tmp_path_factory.mktemp("text")
    ddpexp = Ddpexp(folder, {**warm_environ, "XDG_CACHE_HOME": str(folder / "cache")})
    (folder / "text.txt").write_text("".join("abcdefgh \n"[number * number % 97 % 10] for number in range(3000)))
    sizes = ("model.width=16", "model.num_layers=2", "data.block_size=8", "task.sample_tokens=4", "trainer.threads=1")
    steps = ("trainer.max_steps=4", "trainer.log_every=1", "trainer.global_batch_size=8", "trainer.micro_batch_size=2")

    def trained(*overrides: str) -> Done:
        done = ddpexp("recipe=gpt", "data.path=text.txt", *sizes, *steps, *overrides)
        assert done.code == 0, done.err
        return done

    two = ("strategy=pipeline", "trainer.gpus=2")
    one, other = trained("trainer.gpus=1"), trained(*two)
    assert "pipeline of 2 stages x 1 data rank, schedule 1f1b (0: wte to h.0; 1: h.1 to ln_f)" in other.out
    expected, found = weights(one), weights(other)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
    dropped = [trained(*two, "model.dropout=0.1").result() for _ in range(2)]
    assert dropped[0]["weights_sha256"] == dropped[1]["weights_sha256"] != other.result()["weights_sha256"]
    assert dropped[0]["metrics"] == dropped[1]["metrics"]
