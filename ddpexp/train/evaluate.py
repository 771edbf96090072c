"""Evaluation: every sample of every set counted once, on all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ddpexp.data.batches import EvalBatches
from ddpexp.distributed.world import World
from ddpexp.launch.workers.control import Control
from ddpexp.strategy.options import DataRank
from ddpexp.system.fault_injection import fault_point
from ddpexp.task import Sums, Task
from ddpexp.train.metrics import MetricAccumulator, detached
from ddpexp.train.precision import Precision
from ddpexp.train.task_checks import check_sums


def evaluate(
    task: Task,
    model: Any,
    evals: Mapping[str, EvalBatches],
    precision: Precision,
    world: World,
    data: DataRank,
    control: Control,
) -> dict[str, float] | None:
    """Return the metrics of every evaluation set as `set/metric`; `model` is in evaluation mode.

    Returns None on all ranks when any rank was asked to stop.
    Ranks: all; communicates once for each set.
    """
    metrics: dict[str, float] = {}
    with torch.no_grad(), precision.autocast():
        for name, batches in evals.items():
            means = _evaluate_set(task, model, batches, world, data, control)
            if means is None:
                return None
            metrics |= {f"{name}/{key}": value for key, value in means.items()}
    return metrics


def _evaluate_set(
    task: Task, model: Any, batches: EvalBatches, world: World, data: DataRank, control: Control
) -> Mapping[str, float] | None:
    """Return the means over one set. Data rank r of n evaluates the batches r, r + n, r + 2 n and so on."""
    num_slots = max(batches.num_batches, data.size)
    sums: list[Sums] = []
    stopped = False
    for batch in batches:
        control.heartbeat()
        fault_point("evaluate")
        stopped = control.stop_requested
        if stopped:
            break
        sums.append(_step(task, model, batch, check=not sums))
    if not sums:  # fewer batches than ranks: take the names of the metrics from any batch, and count nothing
        loss, count, metrics = _step(task, model, batches.first(), check=True)
        sums = [(loss * 0, count * 0, {name: (total * 0, n * 0) for name, (total, n) in metrics.items()})]
    slots = range(data.rank, data.rank + len(sums) * data.size, data.size)
    accumulator = MetricAccumulator(world, data, slots, num_slots, task.step)
    accumulator.add(sums)
    return accumulator.totals(stopped)


def _step(task: Task, model: Any, batch: Any, check: bool) -> Sums:
    sums = task.step(model, batch)
    if check:
        check_sums(sums, task.step, trains=False)
    return detached(sums)
