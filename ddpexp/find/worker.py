"""The worker of a trial: a short run with the data's longest samples, and what it took of the memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddpexp.check.context import short_context
from ddpexp.data.batches import TrainBatches
from ddpexp.data.lengths import ByLength
from ddpexp.data.order import Order
from ddpexp.data.streams import Batches
from ddpexp.distributed.world import World
from ddpexp.find.range_test import Divergence, Rising
from ddpexp.launch.workers.control import Control
from ddpexp.loggers.base import Logger
from ddpexp.loggers.collection import LoggerCollection
from ddpexp.system import files
from ddpexp.system.oom import available_bytes, bound_memory, peak_bytes, resident_bytes
from ddpexp.train import worker
from ddpexp.train.callbacks.base import Requests
from ddpexp.train.micro_batch_effects import effects
from ddpexp.train.process import run_rank


def main(request: str) -> int:
    """Train a short run; `request` is JSON made by `ddpexp.find.trial.Trial`. Never returns in a worker."""
    return run_rank(lambda control: _train(json.loads(request), control))


def _train(request: Mapping[str, Any], control: Control) -> None:
    """Build a run, train it, and write what it took of the memory. Ranks: all; communicates."""
    context = short_context(request, control)
    world = context.world
    limit = _limit(world)
    if request["rising"] is not None:
        context = replace(context, experiment=replace(context.experiment, scheduler=Rising(*request["rising"])))
    built = worker.build(context)
    worker.restore(context, built)
    loop = built.loop
    if request["rising"] is None:
        loop.run = replace(loop.run, train=with_longest(loop.run.train))
    elif world.is_rank_zero:
        loop.logger = LoggerCollection([loop.logger, _StopsDiverged(loop.callbacks.requests)])
    try:
        loop.fit()
        built.checkpointer.finish()
    finally:
        loop.logger.close()
    ranks = world.gather_values([_peak(world), limit])
    if world.is_rank_zero:
        answer = {
            "peak_bytes": max(peak for peak, _ in ranks),
            "limit_bytes": min(most for _, most in ranks),
            "is_on_gpu": world.device.type == "cuda",
            "changes": effects(loop.run.strategy.modules),
        }
        files.answer(Path(request["answer"]), answer)
    world.barrier()


def _limit(world: World) -> int:
    """Return how much of its device's memory this rank may take; on CPUs an allocation beyond it fails.

    An allocation that fails is an error of this rank alone. The kernel would kill whichever process it likes.
    """
    if world.device.type == "cuda":
        return torch.cuda.get_device_properties(world.device).total_memory
    limit = resident_bytes() + available_bytes() // world.local_world_size
    bound_memory(1 / world.local_world_size)
    return limit


def _peak(world: World) -> int:
    """Return the most that this rank has taken: on a GPU what torch has reserved, on CPUs what was in RAM."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_reserved(world.device)
    return peak_bytes()


class _StopsDiverged(Logger):
    """Ends a run once its losses show that it has diverged. Ranks: rank zero; the records follow with its request."""

    def __init__(self, requests: Requests) -> None:
        self._requests, self._divergence = requests, Divergence()

    def scalars(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Look at the loss of a step."""
        if "train/loss" in values and self._divergence.add(values["train/loss"]):
            self._requests.stop = "the loss has diverged"


def with_longest(train: Batches) -> Batches:
    """Return batches of which each step has the longest samples, where lengths are known; else the same batches."""
    order = train.order if isinstance(train, TrainBatches) else None
    if not isinstance(train, TrainBatches) or not isinstance(order, ByLength):
        return train
    longest = np.argsort(-order.lengths, kind="stable")[: train.plan.global_batch_size]
    return replace(train, order=_Longest(longest, order.samples_per_epoch))


@dataclass(frozen=True)
class _Longest:
    """A training order that visits a few samples again and again. Shapes: indices (global_batch_size,)."""

    indices: NDArray[np.int64]
    samples_per_epoch: int

    def order(self, seed: int, epoch: int) -> Order:
        """Return the order of one epoch."""
        return lambda positions: self.indices[positions % len(self.indices)]
