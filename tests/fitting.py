"""Whole runs in this process: what a test trains in milliseconds, without a command."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddpexp.config.build import build
from ddpexp.config.declared import default_of
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import EvalBatches, TrainBatches
from ddpexp.data.order import Permutation
from ddpexp.distributed.world import World
from ddpexp.launch.workers.control import Control
from ddpexp.loggers.jsonl import JsonLines
from ddpexp.run.directory import RunDir
from ddpexp.settings.data import DATA_KEYS, CommonData, Data
from ddpexp.settings.experiment import ExperimentSettings
from ddpexp.settings.node import Node
from ddpexp.settings.run import Predict, Recipe, RunSettings
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.base import Strategy
from ddpexp.strategy.ddp import DDP
from ddpexp.strategy.ddp_options import DDPOptions
from ddpexp.strategy.exact.strategy import Exact
from ddpexp.train.average import WeightAverage
from ddpexp.train.callbacks.hooks import Callbacks
from ddpexp.train.loop import Loop
from ddpexp.train.optimizer_average import average_of
from ddpexp.train.precision import Precision
from ddpexp.train.progress import TrainingProgress
from ddpexp.train.run import TrainingRun
from ddpexp.train.schedule import Cosine
from ddpexp.train.states import States

TRAINER = build(
    Trainer,
    {
        "nodes": 1, "gpus": 1, "device": "cpu", "backend": "gloo", "threads": 1, "epochs": None,
        "global_batch_size": 24, "log_every": 4,
    },
    "trainer",
)  # fmt: skip


def asked(**trainer: Any) -> ExperimentSettings:
    """An experiment as asked, for what checks itself against it."""
    common = build(CommonData, {name: default_of(f"data.{name}") for name in DATA_KEYS}, "data")
    return ExperimentSettings(
        recipe=Recipe("points"), task=Node("points.Task"), model=Node("points.Net"),
        data=Data(**vars(common), target="points.data", options={}), optimizer=Node("torch.optim.SGD", {"lr": 0.1}),
        logger={}, callbacks={}, trainer=replace(TRAINER, **trainer), run=build(RunSettings, {}, "run"),
        predict=build(Predict, {}, "predict"),
    )  # fmt: skip


STRATEGY = DDPOptions(
    kind="ddp", find_unused_parameters=False, static_graph=False, gradient_as_bucket_view=True, bucket_cap_mb=25,
    broadcast_buffers=True, reduce_through="auto", comm_hook="none", powersgd_rank=1, sync_batchnorm=False,
)  # fmt: skip
ALONE = World(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))


@dataclass
class Kept:
    """Stands for the checkpointer: keeps the states of each save, but for tensors and what belongs to a rank."""

    saved: list[dict[str, Any]] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        """The steps after which the loop has saved."""
        return [states["progress"]["step"] for states in self.saved]

    def save(self, states: States, progress: TrainingProgress, epoch: float, end: bool) -> str | None:
        kept = {name: part for name, part in states.items() if name.startswith(("progress", "clock"))}
        self.saved.append({name: deepcopy(part.state()) for name, part in kept.items()})
        return "digest" if end else None

    def check(self) -> None:
        """Nothing goes wrong."""

    def finish(self) -> None:
        """Everything is written."""

    def best_weights(self, states: States, step: int) -> AbstractContextManager[int]:
        """The best weights are the last ones."""
        return nullcontext(step)


def restore(loop: Loop, saved: Mapping[str, Any]) -> None:
    """Restore what `Kept` has saved, or other states, by their names."""
    for name, state in saved.items():
        loop.states[name].restore(state)


@dataclass(frozen=True)
class Once:
    """A whole run in this process, and what it recorded."""

    loop: Loop
    records: list[dict[str, Any]]

    @property
    def weights(self) -> dict[str, Tensor]:
        models = self.loop.run.strategy.modules
        return {f"{name}.{key}": value for name, module in models.items() for key, value in module.state_dict().items()}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)


def loop_alone(
    points: Any,
    folder: Path,
    task: Any,
    num_steps: int = 8,
    factory: Any = None,
    evals: Mapping[str, Any] | None = None,
    make: Callable[[Any], torch.optim.Optimizer] = sgd,
    data: Any = None,
    callbacks: Callbacks | None = None,
    control: Control | None = None,
    directory: RunDir | None = None,
    **keys: Any,
) -> tuple[Loop, Path]:
    """Build a run of this process alone, of the recipe `points` and `trainer` keys.

    Return it with the file of its records.
    """
    options = replace(TRAINER, **keys)
    cut = plan_batches(options.global_batch_size, options.micro_batch_size, 1)

    def build() -> Any:
        torch.manual_seed(0)
        return (factory or points.Net)()

    strategy: Strategy
    if options.reduction == "exact":
        strategy = Exact(STRATEGY, ALONE, build, gradient_accumulation_steps=cut.gradient_accumulation_steps)
    else:
        strategy = DDP(STRATEGY, ALONE, build)
    named = (
        task.optimizers(strategy.eval_model, make)
        if hasattr(task, "optimizers")
        else {"optimizer": make(strategy.parameters())}
    )
    path = folder / f"metrics{len(list(folder.iterdir()))}.jsonl"
    sets = {"eval": points.points(33, 1)} if evals is None else evals
    run = TrainingRun(
        task=task, strategy=strategy, optimizers=named, schedule=Cosine(),
        precision=Precision(options.precision, ALONE.device, options.nonfinite == "skip"), world=ALONE,
        control=control or Control(None),
        train=TrainBatches(points.points(96, 0) if data is None else data, cut, 0, options.seed, ALONE.device),
        options=options, num_steps=num_steps, directory=directory,
    )  # fmt: skip
    batches = {name: EvalBatches(part, cut.micro_batch_size, 0, 1, ALONE.device) for name, part in sets.items()}
    average = WeightAverage.from_config(strategy.modules, options, 4)
    loop = Loop(
        run,
        batches,
        JsonLines(path),
        average=average_of(average, strategy.modules, named, options),
        callbacks=callbacks,
    )
    return loop, path


def fit_alone(points: Any, folder: Path, task: Any, num_steps: int = 8, around: Any = None, **options: Any) -> Once:
    """Train in this process, alone; `around` is a context manager around that.

    The options are those of `loop_alone`.
    """
    loop, path = loop_alone(points, folder, task, num_steps, **options)
    try:
        with around or torch.enable_grad():
            loop.fit()
    finally:
        loop.logger.close()
    return Once(loop, [json.loads(line) for line in path.read_text().splitlines()])


def manual(
    points: Any,
    num_steps: int = 8,
    limit: float | None = None,
    leave_out: tuple[int, ...] = (),
    loss: Any = None,
    kind: torch.dtype = torch.float32,
    factory: Any = None,
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Train as a tutorial would; return the weights, and each step's loss and gradient norm."""
    torch.manual_seed(0)
    model = (factory or points.Net)().to(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    data, losses, norms = points.points(96, 0), [], []
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * Cosine().factor(step, num_steps)
        indices = Permutation(96, 0, step // 4)(np.arange(step % 4 * 24, step % 4 * 24 + 24))
        batch = data.gather(torch.from_numpy(indices), ALONE.device)
        optimizer.zero_grad()
        value = loss(model, batch) if loss else nn.functional.cross_entropy(model(batch[1].to(kind)), batch[2])
        value.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), math.inf if limit is None else limit)))
        losses.append(float(value.detach()))
        if step not in leave_out:
            optimizer.step()
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items()}, losses, norms


def near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.allclose(found[name], expected[name], rtol=0, atol=tolerance) for name in expected)
