"""`ddpexp plan`: the arithmetic, what building without memory finds, and the command itself."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpexp.cli.plan import arguments_of, plan
from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.data.batch_plan import plan_batches
from ddpexp.launch import Layout
from ddpexp.plan.arguments import PlanArguments
from ddpexp.plan.build import collect
from ddpexp.plan.calibrate import _seconds, num_steps, run_words, step_ms
from ddpexp.plan.layout import assume
from ddpexp.plan.memory import checkpoint_files, checkpoints_at_once, num_checkpoints, parts
from ddpexp.plan.outcome import Outcome
from ddpexp.plan.speed import (
    _CHUNKED,
    _SLOT,
    Costs,
    Measured,
    Place,
    Way,
    fit,
    fit_reduction,
    predict,
    through_backend,
    through_memory,
)  # fmt: skip
from ddpexp.run.prepare import prepare
from ddpexp.run.training import Training
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.comm.reduce import CHUNKED_BYTES, GATHERED_BYTES, SLOT_BYTES
from ddpexp.strategy.comm.shared_memory import size_of
from ddpexp.strategy.ddp_estimator import _GATHERED, DDPEstimator, buckets, exchange_bytes
from ddpexp.strategy.ddp_options import DDPOptions as Strategy
from ddpexp.strategy.estimator import Bucket, Facts, Parameter
from ddpexp.strategy.reserved import most_blocks
from ddpexp.system.process import children
from tests.conftest import SMALL, Ddpexp
from tests.refusals import refused
from tests.test_user_recipes import write
from tests.typed import call

MIB = 1 << 20


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """Runs are compared with what was planned, however their processes start."""
    return warm_environ


def experiment(*words: str) -> Any:
    composed = compose([*SMALL, *words])
    return parse(composed.values)


TRAINER: Trainer = experiment().trainer
OPTIONS: Strategy = experiment().strategy


def layout(nodes: int = 1, workers: int = 2, device: str = "cpu") -> Layout:
    return Layout(nodes, nodes * workers, device, "gloo" if device == "cpu" else "nccl", 1)


def of_floats(*sizes: int, dtype: str = "float32", trained: bool = True) -> list[Parameter]:
    return [Parameter("model", size, size * getattr(torch, dtype).itemsize, dtype, trained) for size in sizes]


def facts(parameters: Sequence[Parameter], **more: Any) -> Facts:
    own = {
        "buffers_bytes": 0,
        "state_bytes": {"model": 400},
        "optimizer_bytes": 0,
        "activations_bytes": None,
        "batch_bytes": None,
    }
    return Facts(parameters, **{**own, "data_bytes": None, "num_samples": 640, **more})


@pytest.mark.parametrize("rebuilt", [True, False])
def test_buckets_are_cut_as_torch_cuts_them(rebuilt: bool) -> None:
    draw = random.Random(0)
    for _ in range(20):
        parameters = [
            one
            for _ in range(40)
            for one in of_floats(draw.randrange(1, 200_000), dtype=draw.choice(["float32", "float16"]))
        ]
        mine = buckets(parameters, 1, rebuilt)
        order = parameters[::-1] if rebuilt else parameters
        tensors = [torch.empty(one.num_elements, dtype=getattr(torch, one.dtype), device="meta") for one in order]
        known: Any = dist
        indices, _ = known._compute_bucket_assignment_by_size(tensors, [MIB], [False] * len(tensors))
        theirs = [(sum(order[i].num_bytes for i in group), len(group)) for group in indices]
        assert sorted((one.num_bytes, one.num_parameters) for one in mine) == sorted(theirs)


def test_a_parameter_larger_than_a_bucket_closes_it_and_frozen_ones_are_in_none() -> None:
    parameters = [*of_floats(10), *of_floats(MIB, trained=False), *of_floats(MIB), *of_floats(20)]
    found = buckets(parameters, 1)
    assert found == [Bucket("model", "float32", 80 + 4 * MIB, 2), Bucket("model", "float32", 40, 1)]


def test_each_model_has_buckets_of_its_own() -> None:
    parameters = [replace(one, model=name) for name in ("critic", "generator") for one in of_floats(10, 20)]
    assert [(one.model, one.num_bytes) for one in buckets(parameters, 25)] == [("critic", 120), ("generator", 120)]


@pytest.mark.parametrize(
    ("nodes", "workers", "device", "words", "expected"),
    [
        (1, 1, "cpu", [], "none"),
        (1, 2, "cpu", [], "shared_memory"),
        (2, 1, "cpu", [], "backend"),
        (2, 2, "cpu", [], "in_rank_order"),
        (1, 4, "cpu", ["strategy.reduce_through=backend"], "in_rank_order"),
        (1, 4, "cpu", ["strategy.comm_hook=fp16"], "backend"),
        (2, 1, "cpu", ["trainer.reduction=exact", "trainer.micro_batch_size=8"], "in_rank_order"),
        (2, 8, "cuda", [], "backend"),
    ],
)
def test_what_carries_the_gradients(nodes: int, workers: int, device: str, words: list[str], expected: str) -> None:
    found = experiment(*words)
    assert DDPEstimator(found.strategy).transport(found.trainer, layout(nodes, workers, device)) == expected


def test_only_a_search_for_unused_parameters_keeps_the_first_buckets() -> None:
    found = facts(of_floats(MIB // 8, MIB // 2, MIB // 8))

    def cut(**options: Any) -> Any:
        trainer = replace(TRAINER, deterministic=True)
        estimator = DDPEstimator(replace(OPTIONS, bucket_cap_mb=1, **options))
        return estimator.traffic(found, trainer, layout(2, 8, "cuda")).buckets

    assert cut() == buckets(found.parameters, 1, rebuilt=True)
    assert cut(find_unused_parameters=True) == buckets(found.parameters, 1, rebuilt=False)
    assert cut() != cut(find_unused_parameters=True)
    assert cut(find_unused_parameters=True, static_graph=True) == cut()


def test_small_gradients_are_gathered_and_large_ones_exchanged_in_chunks() -> None:
    assert (_GATHERED, _CHUNKED, _SLOT) == (GATHERED_BYTES, CHUNKED_BYTES, SLOT_BYTES)
    assert exchange_bytes([100], 4) == 400
    assert exchange_bytes([1 << 20], 4) == 2 << 20
    assert exchange_bytes([100, 1 << 20], 4) == 400 + (2 << 20)


TWO = layout()


def test_the_parts_of_a_rank() -> None:
    def sizes(
        trainer: Trainer = TRAINER, options: Strategy = OPTIONS, where: Layout = TWO, **more: Any
    ) -> dict[str, int | None]:
        found = facts([*of_floats(100), *of_floats(50, trained=False)], **more)
        return {part.name: part.num_bytes for part in parts(found, trainer, DDPEstimator(options), where)}

    assert sizes(optimizer_bytes=800, shared_bytes=8192) == {
        "parameters": 600, "gradients": 400, "optimizer": 800, "shared memory": 4096, "activations": None,
        "batch": None,
        "data": None, "checkpoint": 600,
    }  # fmt: skip
    assert sizes(options=replace(OPTIONS, gradient_as_bucket_view=False))["buckets"] == 400
    assert "buckets" not in sizes(options=replace(OPTIONS, gradient_as_bucket_view=False), where=layout(workers=1))
    assert sizes(replace(TRAINER, ema_decay=0.9))["average of the weights"] == 600
    assert sizes(replace(TRAINER, precision="bf16"))["copies in bf16"] == 300
    assert sizes(where=layout(2, 2))["exchange"] == 1600
    assert sizes(options=replace(OPTIONS, comm_hook="powersgd"))["PowerSGD's memory"] == 400


def test_checkpoints_on_the_disk() -> None:
    found = facts(of_floats(100), optimizer_bytes=800)
    assert checkpoint_files(found, TRAINER) == {"model.safetensors": 400, "state.optimizers.safetensors": 800}
    assert checkpoint_files(found, replace(TRAINER, ema_decay=0.9))["model.ema.safetensors"] == 400
    assert num_checkpoints(TRAINER, num_steps=25, steps_per_epoch=10) == 3
    assert num_checkpoints(replace(TRAINER, checkpoint_every=0), num_steps=25, steps_per_epoch=10) == 1
    kept = replace(TRAINER, checkpoint_every=10, keep_every=15)
    assert num_checkpoints(kept, num_steps=60, steps_per_epoch=10) == 8  # 10 15 20 30 40 45 50 60
    assert num_checkpoints(kept, num_steps=61, steps_per_epoch=10) == 9
    assert checkpoints_at_once(TRAINER, 2, 20) == 2
    assert checkpoints_at_once(TRAINER, 10, 100) == 3
    assert checkpoints_at_once(replace(TRAINER, keep_best="min:eval/loss"), 10, 100) == 4
    assert checkpoints_at_once(replace(TRAINER, keep_best="min:eval/loss", keep_best_k=3), 10, 100) == 6
    assert checkpoints_at_once(replace(TRAINER, keep_last=None), 10, 100) == 10
    assert checkpoints_at_once(replace(TRAINER, keep_every=50), 10, 100) == 5


def test_partial_sums_are_as_many_as_a_counter_has_digits() -> None:
    assert [most_blocks(leaves) for leaves in (1, 2, 3, 4, 8)] == [1, 2, 2, 3, 4]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--jsn", "plan --jsn: --json?"),
        ("--alpha_us=fast", "plan --alpha_us=fast: number"),
        ("--compute_ms", "plan --compute_ms: one value"),
        ("--num_samples=1.5", "plan --num_samples=1.5: whole"),
        ("-m", "plan -m: one run"),
    ],
)
def test_a_wrong_option_is_refused(typed: str, expected: str) -> None:
    with refused(expected):
        plan(call("plan", typed))


def test_options_stand_anywhere_among_the_overrides() -> None:
    typed = call(
        "plan", "--json", "recipe=mnist", "--alpha-us", "5", "--config-dir", "conf", "--cores=96", "trainer.gpus=2"
    )
    assert arguments_of(typed) == PlanArguments(
        ["recipe=mnist", "--config-dir", "conf", "trainer.gpus=2"], json=True, alpha_us=5.0, cores=96
    )


def test_what_building_without_memory_finds_is_what_a_run_has(ddpexp: Ddpexp) -> None:
    words = [*SMALL, "model=lenet", "optimizer=adamw", "trainer.ema_decay=0.9", "trainer.gpus=2", "trainer.max_steps=2"]
    planned = json.loads(ddpexp("plan", *words, "--json").out)
    assert planned["world"]["world_size"] == 2
    assert (planned["steps_per_epoch"], planned["num_steps"], planned["parameters"]) == (5, 2, 80202)
    assert [part["num_bytes"] for part in planned["memory"]["parts"] if part["name"] == "shared memory"] == [
        size_of(2, 80202 * 4 + 64 * 8) // 2
    ]
    assert size_of(2, SLOT_BYTES) > 4 * SLOT_BYTES
    run = ddpexp(*words).run
    [folder] = (run / "checkpoints").glob("step-*")
    for name, size in planned["checkpoint"]["files"].items():
        assert 0 <= (folder / name).stat().st_size - size < 4096, name  # a header comes before the tensors


@pytest.mark.slow
def test_samples_on_gpus_are_planned_there(ddpexp: Ddpexp) -> None:
    words = [*SMALL, "trainer.device=cuda", "trainer.gpus=2", "data.on_device=true", "--json"]
    memory = json.loads(ddpexp("plan", *words).out)["memory"]
    [samples] = [part for part in memory["parts"] if part["name"] == "samples"]
    assert (samples["num_bytes"], samples["on_host"]) == ((640 + 100) * (28 * 28 + 8), False)


LARGE = """\
import torch
from torch import nn

class Large(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.last = nn.Linear(width, 10)
    def forward(self, images):
        hidden = images.flatten(1).mean(1, keepdim=True).expand(-1, self.last.in_features)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return self.last(hidden)

class Counting(nn.Linear):
    def __init__(self):
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        super().__init__(784, 10)
        self.rates = rates
    def forward(self, images):
        return super().forward(images.flatten(1))
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delitem(sys.modules, "large", raising=False)  # another test's
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    write(tmp_path / "project/large.py", LARGE)
    write(tmp_path / "project/conf/model/large.yaml", "_target_: large.Large\nwidth: 32768\ndepth: 96\n")
    write(tmp_path / "project/conf/model/counting.yaml", "_target_: large.Counting\n")
    return tmp_path / "project/conf"


def experiment_of(configs: Path, *words: str) -> Any:
    composed = compose(
        ["--config-dir", str(configs), *(word for word in SMALL if not word.startswith("model=")), *words]
    )
    return parse(composed.values)


@pytest.mark.slow
def test_neither_machines_nor_memory_need_be_there(ddpexp: Ddpexp, mine: Path) -> None:
    words = [word for word in SMALL if not word.startswith(("model=", "data."))]
    words += [
        "model=large",
        "optimizer=adamw",
        "trainer.global_batch_size=8192",
        "trainer.device=cuda",
        "trainer.gpus=8",
    ]
    asked = ["--config-dir", str(mine), *words, "trainer.nodes=512", "--num_samples=60000", "--cores=96"]
    done = ddpexp("plan", *asked)
    assert done.code == 0, done.err
    assert "Large, 103,079,542,794 parameters, fp32" in done.out
    assert "4,096 GPU workers on 512 machines, 8 each (nccl), 12 threads each" in done.out
    assert "10: 1.43 epochs of 7 steps, each leaves out 2,656 samples" in done.out
    assert re.search(r"^optimizer +825 GB", done.out, re.MULTILINE)
    assert "note: on this machine it would be refused: trainer.device=cuda needs a GPU" in done.out
    assert [path.name for path in ddpexp.folder.iterdir()] == ["project"]


def test_code_beside_no_given_folder_is_refused() -> None:
    with refused("model._target_=large.Large"):
        experiment("model._target_=large.Large")


def test_activations_are_what_goes_into_each_layer(
    mine: Path, digits_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(digits_cache))
    asked = experiment_of(mine, "model=large", "model.width=64", "model.depth=3")
    found, *_ = collect(asked, layout(), prepare(asked.data, asked.trust), None)
    assert found.batch_bytes == 64 * (784 * 4 + 8)
    into_layers = 64 * 64 * 4 * 3
    assert found.activations_bytes is not None
    assert into_layers <= found.activations_bytes <= into_layers + 64 * (64 + 10 + 10 + 2) * 4 + 4


def test_code_that_does_not_work_without_memory_is_built_and_reported(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpexp.plan.meta.bound_memory", lambda: None)  # it would bind this process
    found, steps, _ = collect(experiment_of(mine, "model=counting"), layout(), None, 640)
    assert steps == {"steps_per_epoch": 5, "num_steps": 10}
    assert found.state_bytes == {"model": 7850 * 4}
    assert found.notes["model"].startswith("built in memory, because its code does not work on torch's meta device (")


def test_what_a_run_would_refuse_is_refused_with_the_same_sentence(ddpexp: Ddpexp, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    run, planned = ddpexp(*SMALL, "run.dir=full"), ddpexp("plan", *SMALL, "run.dir=full")
    assert (run.code, planned.code, planned.out) == (2, 2, "")
    assert planned.err == run.err
    assert run.err.startswith("ddpexp: run.dir=full ")


def training(*words: str) -> Training:
    return Training(experiment(*words), "{}", (), ())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trainer.gpus=3"], "trainer.global_batch_size=128: split"),
        (
            ["trainer.nodes=1:3", "launcher=elastic"],
            "trainer.global_batch_size=128: split",
        ),
        (
            ["trainer.backend=nccl", "trainer.device=cpu"],
            "trainer.backend=nccl",
        ),
    ],
)
def test_a_layout_that_no_machine_can_run_is_refused(words: list[str], expected: str) -> None:
    run = training(*words)
    with refused(expected):
        assume(run.job, run.experiment.launcher)


@pytest.mark.parametrize(
    ("words", "cores", "expected"),
    [
        (["trainer.gpus=4"], 2, Layout(1, 4, "cpu", "gloo", 1)),
        (["trainer.gpus=4"], 64, Layout(1, 4, "cpu", "gloo", 16)),
        (["trainer.gpus=4", "trainer.threads=3"], 64, Layout(1, 4, "cpu", "gloo", 3)),
        (["trainer.gpus=8", "trainer.nodes=4", "trainer.device=cuda"], 64, Layout(4, 32, "cuda", "nccl", 8)),
        (["trainer.gpus=2", "trainer.nodes=1:2", "launcher=elastic"], 2, Layout(2, 4, "cpu", "gloo", 1)),
        (["launcher=slurm", "launcher.gpus_per_node=a100:8", "trainer.nodes=2", "launcher.cpus_per_task=6"], None,
         Layout(2, 16, "cuda", "nccl", 6)),
    ],
)  # fmt: skip
def test_the_layout_of_machines_that_are_not_there(words: list[str], cores: int | None, expected: Layout) -> None:
    run = training(*words)
    assert assume(run.job, run.experiment.launcher, cores).layout == expected


def test_what_slurm_is_asked_for_is_reported() -> None:
    words = [
        "launcher=slurm",
        "launcher.gpus_per_node=8",
        "trainer.nodes=2",
        "launcher.cpus_per_task=6",
        "launcher.time=60",
    ]
    run = training(*words)
    request = assume(run.job, run.experiment.launcher).request
    assert request is not None
    assert {"#SBATCH --nodes=2", "#SBATCH --cpus-per-task=48", "#SBATCH --gpus-per-node=8", "#SBATCH --time=60"} <= set(
        request.lines
    )


def at(world_size: int, way: Way = "shared_memory", cores: int = 2, *, by_nccl: bool = False) -> Place:
    return Place(world_size, world_size if cores else 1, 1, cores, way, by_nccl)


def test_a_step_alone_is_its_passes_and_its_update() -> None:
    found = predict(Costs(pass_ms=10, update_ms=2), 3, [], at(1, "none"))
    assert (found.total_ms, found.reduction_ms, found.hidden_ms) == (32, 0, 0)


def test_workers_that_share_cores_take_turns() -> None:
    costs = Costs(pass_ms=10, update_ms=2, alpha_us=1e-3, bandwidth_gbps=1e6)
    assert predict(costs, 1, [100], at(2)).total_ms == pytest.approx(12, rel=1e-3)
    assert predict(costs, 1, [100], at(4)).total_ms == pytest.approx(24, rel=1e-3)
    assert predict(replace(costs, slower=1.25), 1, [100], at(4)).total_ms == pytest.approx(30, rel=1e-3)
    assert predict(replace(costs, slower=1.25), 1, [100], at(512, "backend", 0)).total_ms == pytest.approx(12, rel=1e-2)


def test_the_backend_takes_a_ring_or_a_tree() -> None:
    ring = through_backend(1000, at(8, "backend", 0), alpha=1.0, per_byte=1.0)
    assert ring == 2 * 7 + 2 * 7 / 8 * 1000
    assert through_backend(1000, at(1024, "backend", 0, by_nccl=True), alpha=1.0, per_byte=1.0) == 2 * 10 + 2000
    assert (
        through_backend(10**6, at(8, "backend", 0, by_nccl=True), alpha=1.0, per_byte=1.0) == 2 * 7 + 2 * 7 / 8 * 10**6
    )
    assert through_backend(1000, at(4, "in_rank_order", 0), alpha=1.0, per_byte=1.0) == 3 * (1 + 1000)
    assert through_backend(10**6, at(4, "in_rank_order", 0), alpha=1.0, per_byte=1.0) == 2 * 3 + 2 * 3 / 4 * 10**6


def test_all_buckets_but_the_last_hide_behind_the_last_backward_pass() -> None:
    costs = Costs(pass_ms=30, alpha_us=1e-9, bandwidth_gbps=8e-3)  # a byte takes a microsecond

    def of(*sizes: int) -> tuple[float, float]:
        found = predict(costs, 2, sizes, at(2, "backend", 0))
        return round(found.reduction_ms, 3), round(found.hidden_ms, 3)

    assert of(5000) == (5, 0)
    assert of(5000, 6000, 7000) == (18, 11)
    assert of(50_000, 7000) == (57, 20)


def test_through_memory_large_gradients_go_in_rounds_and_are_summed_in_chunks() -> None:
    assert through_memory(1000, 2)[1] == 3 * 1000
    assert through_memory(1000, 4)[1] == 5 * 1000
    assert through_memory(4 << 20, 4)[1] == 3 * (4 << 20)
    assert [through_memory(1000, size)[0] for size in (2, 4)] == [1, 1]
    assert [through_memory(4 << 20, size)[0] for size in (2, 4)] == [4, 8]


def steps_of(costs: Costs, size: int, way: Way) -> Measured:
    """What would be measured of exact costs: with two workers that take turns, where they go through memory."""

    def step(workers: int, passes: int, cores: int = 2) -> float:
        return predict(
            costs, passes, [size] * (workers - 1), at(workers, way if workers > 1 else "none", cores)
        ).total_ms

    alone, beside = step(1, 1), costs.slower * step(1, 1)
    crowded = predict(replace(costs, slower=1.0), 1, [size], at(2, way, 1)).total_ms if way == "shared_memory" else None
    return Measured(alone, step(1, 2), beside, step(2, 1), crowded, 2.0)


@pytest.mark.parametrize("way", ["shared_memory", "backend"])
def test_exact_times_give_their_costs_back(way: Way) -> None:
    true = Costs(pass_ms=4, update_ms=1, alpha_us=50, bandwidth_gbps=20, slower=1.1)
    light = replace(true, pass_ms=0.2, update_ms=0.1)
    found = fit(steps_of(true, 400_000, way), steps_of(light, 31_400, way), 400_000, 31_400, at(4, way))
    assert [found.pass_ms, found.update_ms, found.slower, found.alpha_us, found.bandwidth_gbps] == pytest.approx(
        [4, 1, 1.1, 50, 20]
    )


def test_noise_makes_nothing_cost_less_than_nothing() -> None:
    noisy = Measured(alone=5, alone_twice=4.5, beside=4, both=4, crowded=8, crowded_turns=2)
    found = fit(noisy, Measured(0.3, None, None, 0.4, 0.5, 2.0), 400_000, 31_400, at(4))
    assert (found.pass_ms, found.update_ms, found.slower) == (0, 5, 1)
    assert predict(found, 1, [400_000], at(4)).total_ms == pytest.approx(10, rel=1e-3)


def test_one_worker_reports_nothing_of_the_reduction() -> None:
    assert fit(Measured(5, 9), None, 1000, 31_400, at(2)) == Costs(pass_ms=4, update_ms=1)
    assert fit(Measured(5), None, 1000, 31_400, at(2)) == Costs(pass_ms=5)


def test_without_a_second_size_all_is_latency() -> None:
    assert fit_reduction([(0.5, 31_400)], at(2, "backend")) == (250, 1e6)


def test_a_short_run_has_the_overrides_of_the_plan_but_its_own_length() -> None:
    typed = [
        "--config-dir",
        "conf",
        "recipe=mine",
        "launcher=slurm",
        "launcher.time=60",
        "trainer.gpus=8",
        "optimizer.lr=0.1",
    ]
    words = run_words(typed, workers=2, passes=3, micro=4, threads=1, steps=36, log_every=3, folder=Path("there"))
    assert words[:5] == ["--config-dir", "conf", "recipe=mine", "optimizer.lr=0.1", "launcher=spawn"]
    assert {
        "trainer.gpus=2",
        "trainer.global_batch_size=24",
        "trainer.micro_batch_size=4",
        "trainer.log_every=3",
    } <= set(words)
    composed = compose([*run_words(list(SMALL), 2, 3, 4, 1, 36, 3, Path("there"))])
    assert parse(composed.values).trainer.epochs is None


def test_the_time_of_a_step_is_that_of_undisturbed_windows() -> None:
    records = [{"train/samples_per_second": rate} for rate in (1.0, 100.0, 100.0, 50.0, 100.0)] + [{"eval/loss": 1.0}]
    assert step_ms(records, global_batch_size=10) == 100
    assert step_ms(records[:1], global_batch_size=10) == 10_000
    assert (num_steps(0.4), num_steps(10), num_steps(5000)) == (4992, 192, 36)


def test_what_a_neighbour_and_those_it_has_started_compute_is_known() -> None:
    """They are killed and nobody waits for them.

    Without this a quiet machine would seem to be busy with other programs.
    """
    burn = "import time; [0 for _ in iter(lambda: time.process_time() < 0.4, False)]; print(flush=True); time.sleep(60)"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, start_new_session=True) as neighbour:
        assert neighbour.stdout is not None
        neighbour.stdout.readline()
        [child] = children(neighbour.pid)
        assert 0.38 <= _seconds(child) <= _seconds(neighbour.pid)  # the kernel counts in hundredths
        os.killpg(neighbour.pid, signal.SIGKILL)
    assert children(neighbour.pid) == []


def test_the_time_is_left_out_with_a_sentence_or_shown_with_its_costs() -> None:
    run = training("trainer.gpus=8", "trainer.nodes=2", "trainer.device=cuda", "trainer.max_steps=100")
    assumed = assume(run.job, run.experiment.launcher, 64)
    outcome = Outcome(run.experiment, assumed, plan_batches(128, "auto", 16), facts(of_floats(10**6)), 5, 100, None)
    assert outcome.step() == "left out: give --compute_ms, --alpha_us and --bandwidth_gbps, or measure with --calibrate"
    assert outcome.as_dict()["step"]["total_ms"] is None
    half = replace(outcome, costs=Costs(10))
    assert half.step() == "left out: give --alpha_us and --bandwidth_gbps, which cannot be measured with one worker"
    whole = replace(outcome, costs=Costs(10, alpha_us=10, bandwidth_gbps=80))
    found = whole.as_dict()["step"]
    assert found["total_ms"] == pytest.approx(10 + 2 * 4 * 0.01 + 2 * 4e6 / 1e7, rel=1e-3)  # NCCL's tree
    assert found["train_seconds"] == pytest.approx(found["total_ms"] / 10)
    assert replace(whole, experiment=experiment("strategy.comm_hook=fp16")).traffic().num_bytes == [2 * 10**6]


@pytest.mark.slow
def test_a_plan_measures_this_machine(ddpexp: Ddpexp) -> None:
    words = [*(word for word in SMALL if "max_steps" not in word), "trainer.gpus=4", "trainer.micro_batch_size=32"]
    done = ddpexp("plan", *words, "--calibrate", "--json", timeout=160)
    assert done.code == 0, done.err
    found = json.loads(done.out)["step"]
    assert found["total_ms"] > found["measured"]["alone"] > 0
    assert list(ddpexp.folder.iterdir()) == []
