"""Pipeline parallelism: against one process, through interruptions, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from ddpexp.launch import Layout
from ddpexp.strategy.ddp_options import DDPOptions
from ddpexp.strategy.estimator import Facts, Parameter
from ddpexp.strategy.mesh import DataRank, Mesh
from ddpexp.strategy.pipeline.estimator import PipelineEstimator
from ddpexp.strategy.pipeline.options import PipelineOptions
from ddpexp.strategy.tensor.options import DividedLayers
from tests.conftest import Ddpexp, Done
from tests.fitting import STRATEGY, TRAINER, asked
from tests.points import Recipe, weights
from tests.records import timeless
from tests.refusals import command_refused, refused

OPTIONS = PipelineOptions("pipeline", 2, None, "1f1b")


def test_neighbours_share_a_stage_and_the_last_stage_reports() -> None:
    ranks = [OPTIONS.data_rank(rank, 4) for rank in range(4)]
    assert ranks == [DataRank(0, 2, False), DataRank(1, 2, False), DataRank(0, 2), DataRank(1, 2)]
    assert OPTIONS.mesh(4).groups("pp_size") == [[0, 2], [1, 3]]


def test_the_dimensions_of_parallelism_have_neighbours_in_order() -> None:
    options = replace(OPTIONS, tp_size=2, dp_shard_size=2)
    mesh = options.mesh(16)
    assert mesh.sizes == (2, 2, 2, 2)
    assert mesh.groups("tp_size")[:2] == [[0, 1], [2, 3]]
    assert mesh.groups("dp_shard_size")[:3] == [[0, 2], [1, 3], [4, 6]]
    assert mesh.groups("dp_replicate_size", "dp_shard_size")[1] == [1, 3, 5, 7]
    assert mesh.groups("pp_size")[-1] == [7, 15]
    assert mesh.drawn() == [
        "pp_size 2 x dp_replicate_size 2 x dp_shard_size 2 x tp_size 2 = 16 workers",
        "pp 0: [0 1] [2 3] | [4 5] [6 7]",
        "pp 1: [8 9] [10 11] | [12 13] [14 15]",
    ]
    ranks = [options.data_rank(rank, 16) for rank in (0, 1, 2, 8, 10, 11, 14)]
    assert [(data.rank, data.size, data.reports) for data in ranks] == [
        (0, 4, False), (0, 4, False), (1, 4, False), (0, 4, True), (1, 4, True), (1, 4, False), (3, 4, True),
    ]  # fmt: skip
    assert DDPOptions.mesh(STRATEGY, 4).drawn() == []
    assert Mesh(dp_replicate_size=2, dp_shard_size=2).drawn()[1] == "0 1 | 2 3"


@pytest.mark.parametrize(
    ("options", "trainer", "expected"),
    [
        ({"split_before": ("a", "b")}, {}, "strategy.split_before: name 1"),
        ({"schedule": "interleaved"}, {}, "strategy.schedule=interleaved: strategy.stages_per_worker=2"),
        ({"stages_per_worker": 2}, {}, "strategy.stages_per_worker=2: strategy.schedule=interleaved"),
        ({"tp_plan": (DividedLayers("a", "colwise"),)}, {}, "strategy.tp_plan: strategy.tp_size=2"),
        ({"tp_size": 2, "tp_plan": (DividedLayers((), "colwise"),)}, {}, "strategy.tp_plan[0].match: empty"),
        ({}, {"reduction": "exact"}, "trainer.reduction=exact: strategy=pipeline"),
        ({}, {"compile": True}, "strategy=pipeline: trainer.compile_blocks=Block"),
        ({}, {"param_dtype": "bf16"}, "strategy=pipeline: trainer.param_dtype=fp32 trainer.precision=bf16"),
        ({}, {"average_batch_norm": 3, "ema_decay": 0.9}, "strategy=pipeline: trainer.average_batch_norm=3"),
    ],
)
def test_what_a_stage_does_not_support_is_refused(
    options: dict[str, Any], trainer: dict[str, Any], expected: str
) -> None:
    with refused(expected):
        replace(OPTIONS, **options).check(asked(**trainer))


def test_blocks_of_a_stage_are_compiled_but_not_recorded_with_the_collectives_of_divided_layers() -> None:
    experiment, layout = asked(compile="reduce-overhead", compile_blocks="Block"), Layout(1, 4, "cuda", "nccl", 1)
    OPTIONS.check(experiment)
    OPTIONS.check_layout(experiment, layout, 4)
    with refused("trainer.compile=reduce-overhead: trainer.compile=true"):
        replace(OPTIONS, tp_size=2).check_layout(experiment, layout, 4)


@pytest.mark.parametrize(
    ("size", "world_size", "micro_batches", "expected"),
    [
        (2, 3, 4, "strategy.pp_size=2: use 3."),
        (4, 6, 4, "strategy.pp_size=4: use 2 or 3 or 6."),
        (2, 1, 4, "strategy.pp_size=2: trainer.gpus=2, or strategy=ddp"),
        (2, 4, 1, "strategy.pp_size=2: trainer.global_batch_size / 4"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(size: int, world_size: int, micro_batches: int, expected: str) -> None:
    layout = Layout(1, world_size, "cpu", "gloo", 1)
    with refused(expected):
        replace(OPTIONS, pp_size=size).check_layout(asked(), layout, micro_batches)


@pytest.mark.parametrize(
    ("options", "world_size", "micro_batches", "expected"),
    [
        ({"tp_size": 2}, 6, 4, "strategy.tp_size=2: use 1 or 3."),
        ({"tp_size": 3, "dp_shard_size": 2}, 6, 4, "strategy.dp_shard_size=2: use 1."),
        ({"dp_shard_size": 3}, 8, 4, "strategy.dp_shard_size=3: use 1 or 2 or 4."),
        ({"schedule": "interleaved", "stages_per_worker": 2}, 2, 5, "strategy.schedule=interleaved: 5 of a step"),
    ],
)  # fmt: skip
def test_sizes_of_several_dimensions_that_do_not_divide_are_refused(
    options: dict[str, Any], world_size: int, micro_batches: int, expected: str
) -> None:
    layout = Layout(1, world_size, "cpu", "gloo", 1)
    with refused(expected):
        replace(OPTIONS, **options).check_layout(asked(), layout, micro_batches)


def estimator(**options: Any) -> PipelineEstimator:
    return PipelineEstimator(replace(OPTIONS, **options))


def test_the_plan_counts_the_largest_stage() -> None:
    parameters = [Parameter("model", 100, 400, "fp32", True), Parameter("model", 200, 800, "fp32", True)]
    facts = Facts(parameters, 0, {"model": 1200}, 2400, 1000, None, None, 100, num_passes=6, blocks_bytes=[400, 800])
    layout = Layout(1, 2, "cpu", "gloo", 1)
    assert [part.num_bytes for part in estimator().memory(facts, TRAINER, layout)] == [800, 800, 1600]
    assert [part.num_bytes for part in estimator(dp_shard_size=2).memory(facts, TRAINER, layout)][2] == 800
    assert estimator().moments(facts, TRAINER, layout) == {"start": 1200, "evaluation": 2800}
    assert estimator(gather_in_evaluation=False).moments(facts, TRAINER, layout) == {"start": 1200}
    assert estimator(init="replay").moments(facts, TRAINER, layout) == {"evaluation": 2800}
    assert estimator().kept_by_workers([100, 10], 6) == [200, 10]
    assert estimator(schedule="gpipe").kept_by_workers([100, 10], 6) == [600, 60]
    interleaved = estimator(schedule="interleaved", stages_per_worker=2)
    assert interleaved.kept_by_workers([10, 10, 10, 10], 6) == [50, 30]
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2), nn.Tanh())
    assert estimator().blocks_bytes({"model": model}, TRAINER) == [160, 72]
    assert estimator(split_before=(1,)).blocks_bytes({"model": model}, TRAINER) == [160, 72]


CODE = """\
import random

import numpy as np


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


class Drawing(Sides):
    # Draws numbers of numpy and Python before the model and behind it, which only the last stage reaches.
    def step(self, model, batch):
        number, rows, labels = batch
        loss, count, metrics = super().step(model, (number, rows * (1 + np.random.rand()), labels))
        return loss * (1 + np.random.rand() + random.random()), count, metrics


class Twice(Sides):
    def step(self, model, batch):
        model(batch[1])
        return super().step(model, batch)


class Part(Sides):
    def on_eval(self, model, batch, logger, step):
        model[3](torch.zeros(2, 8))


class Shown(Sides):
    # Calls the model twice, with one sample and with two; a rank holds only some of its parameters.
    def __init__(self, folder):
        self.folder = folder

    def on_eval(self, model, batch, logger, step):
        rows = torch.linspace(0, 1, 8).reshape(2, 4)
        assert any(len(parameter) == 0 for parameter in model.parameters())
        outputs = [model(rows[:1]), model(rows)]
        torch.testing.assert_close(outputs[0], outputs[1][:1])
        with open(f"{self.folder}/{RANK}", "w") as file:
            file.write(str(outputs[1].tolist()))


class Without(Sides):
    def step(self, model, batch):
        return torch.zeros((), requires_grad=True), len(batch[1]), {}


class Varying(Net):
    def __init__(self, hidden=8, dropout=0.0):
        super().__init__(hidden, dropout)
        self.insert(1, Shrinking())


class Wide(nn.Sequential):
    def __init__(self):
        layers = [layer for _ in range(7) for layer in (nn.Linear(64, 64), nn.Tanh())]
        super().__init__(nn.Linear(4, 64), nn.Tanh(), *layers, nn.Linear(64, 2))


class Kept(Sides):
    # Writes down the most that is kept for backward passes at once, and the parameters of a rank, in bytes.
    def __init__(self, folder):
        self.folder, self.live, self.most = folder, {}, 0

    def step(self, model, batch):
        if not model.training:
            return super().step(model, batch)
        self.known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.held = sum(p.numel() * p.element_size() for p in model.parameters())
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: Box(self, tensor), lambda box: box.tensor):
            return super().step(model, batch)

    def note(self):
        if (now := sum(size for size, _ in self.live.values())) > self.most:
            self.most = now
            with open(f"{self.folder}/{RANK}", "w") as file:
                file.write(f"{now} {self.held}")


class Box:
    def __init__(self, task, tensor):
        storage = tensor.untyped_storage()
        self.task, self.tensor, self.key = task, tensor, storage.data_ptr()
        if self.key not in task.known:
            _, count = task.live.get(self.key, (0, 0))
            task.live[self.key] = storage.nbytes(), count + 1
            task.note()

    def __del__(self):
        if self.key not in self.task.known:
            size, count = self.task.live.pop(self.key)
            if count > 1:
                self.task.live[self.key] = size, count - 1


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
    return [timeless(line) for line in lines]


def samples(done: Done) -> dict[str, bytes]:
    """Return the texts that the model has written in evaluations."""
    board = EventAccumulator(str(done.run / "tb"), size_guidance={"tensors": 0})
    board.Reload()
    tags = [tag for tag in board.Tags()["tensors"] if tag.startswith("sample/")]
    return {tag: board.Tensors(tag)[0].tensor_proto.string_val[0] for tag in tags}


def same(one: Done, other: Done) -> None:
    for done in (one, other):
        assert done.code == 0, done.err
    assert one.result()["weights_sha256"] == other.result()["weights_sha256"]
    assert records(one) == records(other)


NORMED = ("model._target_=points.Normed", "~model.hidden", "~model.dropout")
AVERAGED = ("trainer.ema_decay=0.9", "task._target_=points.Padded", "trainer.nonfinite=skip", "trainer.precision=bf16")


INTERLEAVED = ("strategy.schedule=interleaved", "strategy.stages_per_worker=2")
NEVER_WHOLE = ("strategy.init=replay", "strategy.gather_in_evaluation=false")


@pytest.mark.variants(1)
@pytest.mark.parametrize("extra", [(), NORMED, AVERAGED], ids=["plain", "normed", "averaged"])
def test_the_weights_and_records_are_those_of_one_process(recipe: Recipe, extra: tuple[str, ...]) -> None:
    one = recipe(*COMMON, *ONE, *extra)
    same(one, recipe(*COMMON, *PIPELINE, *extra, *((*INTERLEAVED, *NEVER_WHOLE) if extra else ())))


@pytest.mark.slow
def test_three_stages_have_the_weights_and_records_of_one_process(recipe: Recipe) -> None:
    three = ("strategy.pp_size=3", "trainer.gpus=3", "strategy.schedule=gpipe", "strategy.split_before=[2,3]")
    whole = recipe(*COMMON, *PIPELINE, *three, *NEVER_WHOLE, "trainer.micro_batch_size=6")
    same(recipe(*COMMON, *ONE), whole)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4], ids=["a pipe", "two pipes"])
def test_an_evaluation_through_the_stages_calls_the_model_as_a_whole(
    recipe: Recipe, tmp_path: Path, workers: int
) -> None:
    options = (*COMMON, *PIPELINE, *NEVER_WHOLE, f"trainer.gpus={workers}", "trainer.micro_batch_size=3")
    part = recipe(*options, "task._target_=points.Part")
    assert part.code == 1
    assert "the evaluation calls 3 of the model by itself, which is in stage 1 of the pipeline" in part.err
    done = recipe(*options, "task._target_=points.Shown", f"+task.folder={tmp_path}")
    assert done.code == 0, done.err
    shown = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(workers)]
    assert shown == [shown[0]] * workers  # of all workers of each pipe


@pytest.mark.slow
def test_workers_with_the_same_batch_draw_the_same_numbers_of_the_host(recipe: Recipe) -> None:
    options = (*COMMON, *PIPELINE, "task._target_=points.Drawing")
    plan = 'strategy.tp_plan=[{match:"0",style:colwise},{match:"3",style:rowwise}]'
    two, four = recipe(*options), recipe(*options, "trainer.gpus=4", "strategy.tp_size=2", plan)
    assert (two.code, four.code) == (0, 0), two.err + four.err
    for one, other in zip(records(two), records(four), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    same(two, recipe(*COMMON, *options, *INTERLEAVED))


WIDE = ("model._target_=points.Wide", "~model.hidden", "~model.dropout", "trainer.global_batch_size=48")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [INTERLEAVED, ("strategy.schedule=gpipe",), ("strategy.schedule=1f1b",)])
def test_the_plan_knows_what_a_worker_keeps_for_backward_passes(
    recipe: Recipe, tmp_path: Path, schedule: tuple[str, ...]
) -> None:
    options = (*WIDE, *PIPELINE, *schedule)
    done = recipe(*COMMON, *options, "task._target_=points.Kept", f"+task.folder={tmp_path}")
    assert done.code == 0, done.err
    kept, held = zip(*(map(int, (tmp_path / str(rank)).read_text().split()) for rank in range(2)), strict=True)
    words = [word for word in recipe.words(*options)[0] if not word.startswith("run.dir")]
    planned = json.loads(recipe.ddpexp("plan", "--json", *words).out)
    parts = {part["name"]: part["num_bytes"] for part in planned["memory"]["parts"]}
    assert parts["activations"] == pytest.approx(max(kept), rel=0.1)
    assert parts["parameters"] == max(held)


@pytest.mark.slow
def test_copies_of_stages_share_the_data_as_the_workers_of_ddp(recipe: Recipe) -> None:
    same(
        recipe(*COMMON, *NORMED, "strategy=ddp", "trainer.gpus=2", "trainer.micro_batch_size=3"),
        recipe(*COMMON, *NORMED, *PIPELINE, "trainer.gpus=4", "trainer.micro_batch_size=3"),
    )


@pytest.mark.slow
def test_a_killed_run_resumes_as_a_pipeline_and_another_strategy_resumes_from_it(recipe: Recipe) -> None:
    options = (*COMMON, *PIPELINE, "model.dropout=0.2", "trainer.checkpoint_every=1", "strategy.init=replay")
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


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "rank"), [("backward:sleep:0:6", 0), ("forward:sleep:1:6", 1)])
def test_a_stage_that_hangs_is_named_and_not_the_one_that_waits_for_it(recipe: Recipe, fault: str, rank: int) -> None:
    options = (*COMMON, *PIPELINE, "trainer.timeout.step_seconds=2")
    done = recipe(*options, environ={"DDPEXP_FAULT": fault})
    assert done.code == 1
    assert f"ddpexp: rank {rank} on" in done.err
    assert "Hang: no progress" in done.err


@pytest.mark.variants(1)
@pytest.mark.parametrize(
    ("task", "model", "expected"),
    [
        ("Without", "Net", "without calling the model"),
        ("Twice", "Net", "calls the model twice"),
        ("Sides", "Varying", "[5, 8] in float32"),
    ],
)
def test_what_stages_cannot_pass_on_ends_the_run_with_a_message(
    recipe: Recipe, task: str, model: str, expected: str
) -> None:
    done = recipe(*COMMON, *PIPELINE, f"task._target_=points.{task}", f"model._target_=points.{model}")
    assert done.code == 1
    assert expected in done.err


def test_an_optimizer_of_whole_matrices_is_refused(recipe: Recipe) -> None:
    done = recipe(*ONE, "strategy=pipeline", "optimizer=muon")
    assert done.code == 2
    assert "with strategy=pipeline a worker has only the parameters of its stage" in done.err


def test_a_check_with_one_worker_is_refused(recipe: Recipe) -> None:
    words, _ = recipe.words(*PIPELINE)
    done = recipe.ddpexp("check", *words)
    command_refused(done, "strategy: strategy=ddp", out=None)


@pytest.mark.slow
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
    one, other = trained("trainer.gpus=1"), trained(*two, *NEVER_WHOLE)
    assert "pipeline of 2 stages x 1 data rank, schedule 1f1b (0: wte to h.0; 1: h.1 to ln_f)" in other.out
    expected, found = weights(one), weights(other)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)
    assert samples(one) == samples(other)
    assert samples(one)
    dropped = [trained(*two, "model.dropout=0.1").result() for _ in range(2)]
    assert dropped[0]["weights_sha256"] == dropped[1]["weights_sha256"] != other.result()["weights_sha256"]
    assert dropped[0]["metrics"] == dropped[1]["metrics"]
