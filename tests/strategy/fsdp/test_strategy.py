"""strategy=fsdp: the weights of replicas, the checkpoints of replicas, and sentences for what cannot be sharded."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpexp.errors import DdpexpError
from ddpexp.launch import Layout
from ddpexp.strategy.estimator import Facts, Parameter
from ddpexp.strategy.fsdp.blocks import blocks_of
from ddpexp.strategy.fsdp.estimator import FSDPEstimator
from ddpexp.strategy.fsdp.strategy import FSDP
from tests.conftest import ROOT, Ddpexp
from tests.fitting import ALONE, TRAINER, asked
from tests.points import Recipe
from tests.records import timeless
from tests.refusals import refused
from tests.strategy.fsdp.ranks import OPTIONS, Block, Net
from tests.strategy.on_ranks import works
from tests.strategy.test_sharded_optimizer import files


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "size"),
    [
        ("two_workers", 2),
        ("evaluated", 3),
        ("teacher", 2),
        ("rows_of_replicas", 4),
    ],
)
def test_the_numbers_are_those_of_replicas(case: str, size: int, tmp_path: Path, forked_servers: None) -> None:
    works("tests.strategy.fsdp.ranks", case, size, tmp_path / "logs")


def test_what_cannot_be_sharded_is_refused_by_name(tmp_path: Path, forked_servers: None) -> None:
    works("tests.strategy.fsdp.ranks", "cannot", 2, tmp_path / "logs")


def test_blocks_are_the_smallest_modules_of_a_size_or_those_of_a_class() -> None:
    model = Net()
    small = 4 * 7 * 13  # bytes of the largest matrix
    assert blocks_of({"model": model}, None, small) == [model.blocks[0].up, model.blocks[0].down, model]
    assert blocks_of({"model": model}, None, 2 * small + 1) == [model.blocks[0], model]
    assert blocks_of({"model": model}, None, 1e9) == [model]
    assert blocks_of({"model": model}, ("Block",), 1) == [model.blocks[1], model.blocks[0], model]
    assert blocks_of({"model": model}, None, small, "Block") == [model.blocks[0], model]
    layer = nn.TransformerEncoderLayer(8, 2, 8)
    assert blocks_of({"model": layer}, None, 4 * 8 * 8) == [layer.self_attn, layer.linear1, layer.linear2, layer]
    pair = {"one": nn.Linear(2, 2), "other": Block(2, 2)}
    assert blocks_of(pair, ("Block",), 1) == [pair["other"], pair["one"]]


def test_one_worker_refuses_a_class_that_the_model_lacks_too() -> None:
    with refused("strategy.blocks=[Blok]: Block (2)"):
        FSDP(replace(OPTIONS, blocks=("Blok",)), ALONE, Net)
    FSDP(replace(OPTIONS, blocks=("Block",)), ALONE, Net)


@pytest.mark.parametrize(("name", "word"), [("tutor", "which has model"), ("model", "is trained")])
def test_one_worker_refuses_what_cannot_be_held_whole_too(name: str, word: str) -> None:
    with refused(f"strategy.whole=[{name}]: {word}"):
        FSDP(replace(OPTIONS, whole=(name,)), ALONE, Net)


@pytest.mark.parametrize(
    ("options", "trainer", "expected"),
    [
        ({}, {"compile": True}, "trainer.compile=true: trainer.compile_blocks=Block"),
        ({"broadcast_buffers": False}, {"reduction": "exact"}, ": strategy.broadcast_buffers=true"),
        ({"offload": True}, {"precision": "fp16"}, "strategy.offload=true: trainer.precision=fp16"),
        ({"offload": True}, {"nonfinite": "skip"}, "strategy.offload=true: trainer.nonfinite=stop"),
        ({"offload": True, "init": "replay"}, {}, "strategy.offload=true: strategy.init=replay"),
    ],
)
def test_what_the_trainer_cannot_combine_with_it_is_refused(
    options: dict[str, Any], trainer: dict[str, Any], expected: str
) -> None:
    with refused(expected):
        replace(OPTIONS, **options).check(asked(**trainer))


def test_blocks_are_compiled_but_recorded_in_no_graphs_that_know_addresses() -> None:
    graphs = {"compile": "max-autotune", "compile_blocks": "Block"}
    for trainer in ({"compile": True, "compile_blocks": "Block"}, graphs):
        OPTIONS.check(asked(**trainer))
    OPTIONS.check_layout(asked(**graphs), Layout(1, 2, "cpu", "gloo", 1), 1)
    with refused("trainer.compile=max-autotune: trainer.compile=max-autotune-no-cudagraphs"):
        OPTIONS.check_layout(asked(**graphs), Layout(1, 2, "cuda", "nccl", 1), 1)


def test_replicas_must_divide_the_workers() -> None:
    for size, suggestion in ((3, "use 1 or 2."), (4, "strategy=ddp")):
        with refused(f"strategy.dp_replicate_size={size}: {suggestion}"):
            replace(OPTIONS, dp_replicate_size=size).check_layout(asked(), Layout(1, 4, "cpu", "gloo", 1), 1)


def test_offload_needs_gpus_and_something_to_gather() -> None:
    for size, device, word in ((2, "cpu", "CPU workers"), (1, "cuda", "two or more workers")):
        with refused(f"strategy.offload=true: {word}"):
            replace(OPTIONS, offload=True).check_layout(asked(), Layout(1, size, device, "gloo", 1), 1)
    replace(OPTIONS, offload=True).check_layout(asked(), Layout(1, 2, "cuda", "nccl", 1), 1)


def test_gpu_workers_without_nccl_are_refused_as_torch_would_set_it_up_all_the_same() -> None:
    OPTIONS.check_layout(asked(), Layout(1, 1, "cuda", "gloo", 1), 1)
    with refused("strategy=fsdp: trainer.backend=auto, or strategy=ddp"):
        OPTIONS.check_layout(asked(), Layout(1, 2, "cuda", "gloo", 1), 1)


def test_what_makes_other_bits_is_logged() -> None:
    each = replace(OPTIONS, reduce_each_micro_batch=True)
    assert each.other_bits(TRAINER, 2).startswith(
        "strategy.reduce_each_micro_batch=true sums gradients over the workers"
    )
    exact = replace(TRAINER, reduction="exact")
    assert "bits may differ" in OPTIONS.other_bits(replace(TRAINER, channels_last=True), 1)
    assert [OPTIONS.other_bits(TRAINER, 2), each.other_bits(TRAINER, 1), each.other_bits(exact, 2)] == ["", "", ""]


def test_the_plan_counts_shares_and_the_blocks_that_are_gathered() -> None:
    facts = Facts([Parameter("model", 1000, 4000, "fp32", True)], 0, {"model": 4000}, 8000, None, None, None, 100)
    estimator, alone = FSDPEstimator(OPTIONS), Layout(1, 1, "cpu", "gloo", 1)
    parts = {part.name: part.num_bytes for part in estimator.memory(facts, TRAINER, replace(alone, world_size=4))}
    assert parts == {"parameters": 1000, "gradients": 1000, "optimizer": 2000, "gathered blocks": 16000}
    assert "gathered blocks" not in {part.name for part in estimator.memory(facts, TRAINER, alone)}


@pytest.mark.slow
def test_torchmetrics_and_finished_metrics_are_those_of_one_process(
    warm_environ: dict[str, str], tmp_path: Path
) -> None:
    ddpexp = Ddpexp(tmp_path, warm_environ)
    records: list[list[dict[str, object]]] = []
    example = ("--config-dir", str(ROOT / "examples/metrics/conf"), "recipe=metrics")
    keys = ("trainer.reduction=exact", "trainer.global_batch_size=48", "trainer.micro_batch_size=8")
    for size, options in (
        (1, ()),
        (3, ("strategy=fsdp",)),
        (3, ("strategy=fsdp", "strategy.gather_in_evaluation=false")),
    ):
        run = tmp_path / f"run {len(records)}"
        done = ddpexp(*example, *keys, f"trainer.gpus={size}", *options, f"run.dir={run}")
        assert done.code == 0, done.err
        records.append([strip(line) for line in (run / "metrics.jsonl").read_text().splitlines()])
    assert "eval/auroc" in records[0][-1] or "test/auroc" in records[0][-1]
    assert records[1] == records[0] == records[2]


SHOWS = """\
class Shows(Sides):
    # Calls the model after an evaluation, which a sharded one does on every rank.
    def on_eval(self, model, batch, logger, step):
        print(f"shown by rank {RANK}: {float(self.step(model, batch)[0]):.9g}")
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, warm_environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("fsdp"), warm_environ), SHOWS)


@pytest.mark.slow
def test_checkpoints_are_those_of_replicas_and_either_strategy_resumes_the_other(recipe: Recipe) -> None:
    ways = (
        "optimizer=adamw",
        "trainer.gpus=2",
        "trainer.threads=1",
        "trainer.micro_batch_size=6",
        "trainer.ema_decay=0.9",
        "trainer.clip_grad_norm=0.1",
        "trainer.log_every=1",
    )
    whole = recipe(*ways)
    assert whole.code == 0, whole.err
    run = recipe.ddpexp.folder / "in turn"
    callbacks = (
        "callbacks=[histograms,lr_monitor,find_nonfinite,early_stopping]",
        "callbacks.histograms.every=1",
        "logger=tensorboard",
    )
    for steps, strategy in ((3, "fsdp"), (6, "ddp"), (8, "fsdp")):
        done = recipe(*ways, *callbacks, f"strategy={strategy}", f"trainer.max_steps={steps}", run=run)
        assert done.code == 0, done
    assert files(run) == files(whole.run)
    assert done.result()["weights_sha256"] == whole.result()["weights_sha256"]
    key = "train/grad_norm"
    norms, expected = ({line["step"]: line[key] for line in r.metrics() if key in line} for r in (done, whole))
    assert norms == expected
    assert max(norms.values()) > 0.1  # as it was before clipping


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "interrupted"), [(33, False), (9, False), (33, True)])
def test_ranks_evaluate_together_what_they_do_not_hold_whole(recipe: Recipe, samples: int, interrupted: bool) -> None:
    overrides = (
        "trainer.gpus=4", "trainer.micro_batch_size=6", f"data.test={samples}", "task._target_=points.Shows",
        "strategy=fsdp",
    )  # fmt: skip
    runs = []
    for way in ("true", "false"):
        environ = {"DDPEXP_FAULT": "evaluate:term:1:2"} if interrupted and way == "false" else {}
        done = recipe(*overrides, f"strategy.gather_in_evaluation={way}", environ=environ)
        if environ:
            assert done.code == 143, done
            done = recipe(*overrides, "strategy.gather_in_evaluation=false", run=done.run)
        assert done.code == 0, done
        runs.append(done)
    whole, together = ([strip(line) for line in (done.run / "metrics.jsonl").read_text().splitlines()] for done in runs)
    assert whole == together
    shown = [re.findall(r"shown by rank \d: (\S+)", (done.run / "ranks/0.log").read_text())[-1] for done in runs]
    assert shown[0] == shown[1]
    assert [len(list(done.run.glob("ranks/*.log"))) for done in runs] == [4, 4]
    assert "shown by rank 3" in (runs[1].run / "ranks/3.log").read_text()


def strip(line: str) -> dict[str, object]:
    """Return a record without its times."""
    return timeless(json.loads(line))


def test_a_step_may_leave_out_one_of_several_models_but_no_part_of_one() -> None:
    strategy = FSDP(OPTIONS, ALONE, lambda: {"left": nn.Linear(2, 2), "right": nn.Linear(2, 2)})
    left = strategy.modules["left"]
    assert isinstance(left, nn.Linear)
    with strategy.micro_batch(True):
        left(torch.ones(1, 2)).sum().backward()
    strategy.clear_gradient()
    with refused("left.bias: strategy.find_unused_parameters=true", DdpexpError), strategy.micro_batch(True):
        left.weight.sum().backward()  # type: ignore[no-untyped-call]
