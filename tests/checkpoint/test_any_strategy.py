"""A checkpoint does not know who wrote it: any strategy, at any number of workers, resumes from any other's.

Each link of a chain restores the checkpoint of the one before, evaluates, and saves. Its files are those of the first,
byte for byte; so each link would have written the same files for any other reader.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

import ddpexp
from ddpexp.checkpoint.format import complete_checkpoints, open_checkpoint
from ddpexp.checkpoint.loading import load_weights
from ddpexp.checkpoint.reader import weights_sha256
from ddpexp.checkpoint.writer import Writer
from ddpexp.config.strategies import builder_of
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import TrainBatches
from ddpexp.data.datasets import Arrays
from ddpexp.distributed.rng import HostRandom
from ddpexp.distributed.world import World
from ddpexp.launch.workers.control import Control
from ddpexp.loggers.base import Logger
from ddpexp.run.directory import RunDir
from ddpexp.strategy.options import Options
from ddpexp.strategy.replica import Replicas
from ddpexp.task import Sums
from ddpexp.train.average import WeightAverage
from ddpexp.train.checkpointer import Checkpointer
from ddpexp.train.loop import Loop
from ddpexp.train.precision import Precision
from ddpexp.train.run import TrainingRun
from ddpexp.train.schedule import Cosine
from ddpexp.train.states import RandomNumbers
from tests.conftest import Ddpexp, finish
from tests.fitting import STRATEGY, TRAINER
from tests.points import Recipe
from tests.ranks import on_ranks
from tests.strategy.fsdp.ranks import OPTIONS, Net, seeded, train

WAYS: dict[str, tuple[Options, str]] = {
    "ddp": (STRATEGY, "fast"),
    "sharded optimizer": (replace(STRATEGY, shard_optimizer=True), "fast"),
    "exact": (replace(STRATEGY, shard_optimizer=True), "exact"),
    "fsdp": (OPTIONS, "fast"),
    "replayed": (replace(OPTIONS, init="replay"), "fast"),
    "reset": (replace(OPTIONS, init="reset_parameters"), "fast"),
    "hybrid": (replace(OPTIONS, dp_replicate_size=2), "fast"),
    "exact fsdp": (OPTIONS, "exact"),
}
CHAIN = [
    ("ddp", 1), ("fsdp", 3), ("exact", 4), ("replayed", 4), ("sharded optimizer", 3), ("hybrid", 4), ("ddp", 2),
    ("reset", 3), ("replayed", 2), ("sharded optimizer", 2), ("fsdp", 1), ("exact", 1), ("hybrid", 4), ("exact", 3),
    ("fsdp", 4), ("exact fsdp", 2), ("ddp", 3),
]  # fmt: skip
SECONDS = 60


class Regress:
    """A task that no test takes a step of."""

    def step(self, model: Any, batch: Any) -> Sums:
        loss = model(batch[0]).square().sum()
        return loss, len(batch[0]), {}


def build(world: World, way: str, folder: Path) -> Loop:
    """Return a run that is ready to be restored, and saves into `folder`."""
    options, reduction = WAYS[way]
    trainer = replace(TRAINER, global_batch_size=12, micro_batch_size=1, reduction=reduction, ema_decay=0.9)  # type: ignore[arg-type]
    plan = plan_batches(12, 1, world.world_size)
    options = options if way == "ddp" else options.to_be_loaded()
    strategy = builder_of(options)(
        options, world, seeded(Net), trainer=trainer, gradient_accumulation_steps=plan.gradient_accumulation_steps,
        prepare=lambda models: None,
    )  # fmt: skip
    optimizers = strategy.build_optimizers(
        lambda model: {"optimizer": torch.optim.AdamW(strategy.parameters(), lr=0.1)}
    )
    average = WeightAverage.from_config(strategy.modules, trainer, 4)
    checkpointer = Checkpointer(RunDir(folder), Writer(folder, world), strategy, Logger(), world, {}, {}, b"")
    random = RandomNumbers(HostRandom(0, world.rank), world)
    run = TrainingRun(
        task=Regress(), strategy=strategy, optimizers=optimizers, schedule=Cosine(), world=world,
        precision=Precision("fp32", world.device, False), control=Control(None), options=trainer, num_steps=8,
        train=TrainBatches(Arrays((torch.zeros(24, 9),)), plan, world.rank, 0, world.device),
    )  # fmt: skip
    return Loop(run, {}, Logger(), checkpointer, average, None, {"rank/random": random})


def link(world: World, way: str, source: Path | None, folder: Path) -> tuple[str | None, list[float]]:
    """Restore a checkpoint, or train a little; then save. Return the hash of the weights, and what the model gives."""
    loop = build(world, way, folder)
    checkpointer = loop.checkpointer
    assert isinstance(checkpointer, Checkpointer)
    if source is None:
        assert isinstance(loop.run.strategy, Replicas)
        train(world, loop.run.strategy, lambda parameters: loop.run.optimizers["optimizer"])
        loop.progress.step = 6
    else:
        checkpoint = open_checkpoint(complete_checkpoints(source)[0])
        assert checkpoint.problem(world.rank, world.world_size) is None
        checkpointer.restore(checkpoint, loop.states)
        checkpointer.resumed_from = None  # it is saved again, elsewhere
    with torch.no_grad(), loop.run.strategy.evaluation() as model:
        given = model(torch.linspace(-1, 1, 45).view(5, 9)).flatten().tolist()
    loop._start()
    digest = loop._save(end=True)
    checkpointer.finish()
    return digest, given


def test_each_strategy_resumes_what_any_other_has_written(tmp_path: Path) -> None:
    folders = [tmp_path / f"{number} {way} {size}" for number, (way, size) in enumerate(CHAIN)]
    (tmp_path / "ranks").mkdir()

    def work(world: World) -> list[Any]:
        dist.destroy_process_group()
        results = []
        for number, (way, size) in enumerate(CHAIN):
            if world.rank < size:
                store = FileStore(str(tmp_path / f"store {number}"), size)
                dist.init_process_group(
                    "gloo", store=store, rank=world.rank, world_size=size, timeout=timedelta(seconds=SECONDS)
                )
                smaller = replace(world, world_size=size, local_world_size=size)
                results.append(link(smaller, way, folders[number - 1] if number else None, folders[number]))
                dist.barrier()
                dist.destroy_process_group()
            while not list(folders[number].glob("step-*")):
                time.sleep(0.01)
        dist.init_process_group("gloo", store=FileStore(str(tmp_path / "last"), 4), rank=world.rank, world_size=4)
        return results

    by_rank = on_ranks(tmp_path / "ranks", 4, work)
    assert not [result for result in by_rank if isinstance(result, str)], by_rank
    digest, given = by_rank[0][0]
    for (way, size), result in zip(CHAIN, by_rank[0], strict=True):
        assert result == (digest, given), (way, size)
    for number, (way, size) in enumerate(CHAIN):
        assert hashes(folders[number]) == hashes(folders[0]), (way, size)
    model = Net()
    load_weights({"model": model}, complete_checkpoints(folders[-1])[0], "the checkpoint")
    assert weights_sha256({"model": model}) == digest


def hashes(folder: Path) -> dict[str, str]:
    """Return the hashes of the files that depend on weights and optimizers."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in complete_checkpoints(folder)[0].iterdir()
        if path.name.startswith(("model", "state.optimizers", "state.modules"))
    }


def sharded(
    size: int, replicas: int = 1, init: str = "whole", gather: str = "true", reduction: str = "fast"
) -> tuple[str, ...]:
    return (
        "strategy=fsdp", f"strategy.dp_replicate_size={replicas}", f"strategy.init={init}",
        f"trainer.reduction={reduction}",
        f"strategy.gather_in_evaluation={gather}", f"trainer.gpus={size}",
    )  # fmt: skip


def replicated(size: int, reduction: str = "fast", optimizer: str = "false") -> tuple[str, ...]:
    return (
        "strategy=ddp", f"strategy.shard_optimizer={optimizer}", f"trainer.reduction={reduction}",
        f"trainer.gpus={size}",
    )  # fmt: skip


COMMANDS = {
    "ddp": replicated(2),
    "sharded optimizer": replicated(3, optimizer="true"),
    "exact": replicated(4, "exact"),
    "fsdp": sharded(3),
    "replayed": sharded(2, init="replay", gather="false"),
    "hybrid": sharded(4, replicas=2),
    "exact fsdp": sharded(2, reduction="exact"),
    "alone": replicated(1),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, warm_environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("any"), warm_environ))


@pytest.mark.slow
@pytest.mark.parametrize("writer", COMMANDS)
def test_a_run_of_each_strategy_is_resumed_evaluated_and_opened_by_every_other(
    writer: str, recipe: Recipe, tmp_path: Path
) -> None:
    common = ("optimizer=adamw", "trainer.micro_batch_size=2", "trainer.ema_decay=0.9", "trainer.threads=1")
    begun = recipe(*common, *COMMANDS[writer], "trainer.max_steps=2")
    assert begun.code == 0, begun
    for reader, overrides in COMMANDS.items():
        run = shutil.copytree(begun.run, tmp_path / f"resumed by {reader}")
        done = recipe(*common, *overrides, "trainer.max_steps=4", run=run)
        assert (done.code, "resumed after step 2" in done.out) == (0, True), (reader, done)
        opened = ddpexp.open_run(run, config_dir=recipe.folder / "conf")
        assert weights_sha256({"model": opened.model(weights="raw")}) == done.result()["weights_sha256"], reader
        process, _ = recipe.ddpexp.start("evaluate", "--config-dir", str(recipe.folder / "conf"), str(run))
        evaluated = finish(process, run)
        assert f"eval/loss {done.result()['metrics']['eval/loss']:.6g}" in evaluated.out, (reader, evaluated)
