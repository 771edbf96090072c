"""Evaluation: every sample of every set counted once, on all ranks together."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ddpexp.config.build import nearest
from ddpexp.data.batches import EvalBatches
from ddpexp.distributed.rng import seed_evaluation
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.launch.workers.control import Control
from ddpexp.settings.metrics import TEST_SET
from ddpexp.strategy.mesh import DataRank
from ddpexp.system.fault_injection import fault_point
from ddpexp.task import HasFinish, Sums, Task
from ddpexp.train.eval_metrics import SetMetrics
from ddpexp.train.metrics import MetricAccumulator, MetricError, detached
from ddpexp.train.precision import Precision
from ddpexp.train.task_checks import check_sums, holds_plain_values, is_torchmetrics, unnoticed
from ddpexp.train.task_step import CurrentProgress, function_of, global_loss_of, step_of


@dataclass(frozen=True)
class Evaluator:
    """Computes the metrics of evaluation sets.

    Attributes:
        together: The model's forward pass communicates: every rank does the same number of passes.
    """

    task: Task
    precision: Precision
    world: World
    data: DataRank
    control: Control
    current: CurrentProgress
    together: bool = False

    def evaluate(self, model: Any, evals: Mapping[str, EvalBatches]) -> dict[str, float] | None:
        """Return the metrics of every set as `set/metric`; `model` is in evaluation mode.

        Returns None on all ranks when any rank was asked to stop.
        Ranks: all; communicates once for each set, and more if the task has more than pairs of scalars.

        Raises:
            MetricError: on all ranks, for a metric that cannot be computed.
        """
        metrics: dict[str, float] = {}
        with torch.no_grad():
            for name, batches in evals.items():
                values = self._evaluate_set(model, batches)
                if values is None:
                    return None
                metrics |= {f"{name}/{key}": value for key, value in values.items()}
        return metrics

    def _evaluate_set(self, model: Any, batches: EvalBatches) -> dict[str, float] | None:
        """Return the metrics of one set. Data rank r of n evaluates the batches r, r + n, r + 2 n and so on."""
        task, step = self.task, step_of(self.task, self.current)
        world = self.world
        data = self.data
        metrics = SetMetrics(task, world, data, batches.num_batches)
        sums: list[Sums] = []
        uncounted: Sums | None = None
        stopped = False
        with self.precision.autocast():
            for batch, counts in _passes(batches, data, self.together):
                self.control.status.heartbeat()
                fault_point("evaluate")
                stopped = self.control.stop_requested
                if self.together:
                    stopped = _any_rank(stopped, world)
                if stopped:
                    break
                seed_evaluation(data.rank + len(sums) * data.size, world.device)
                if not counts:
                    uncounted = _sums(task, step(model, batch), metrics, check=not sums, counts=False)
                    break
                sums.append(_sums(task, step(model, batch), metrics, check=not sums))
                self.control.show_activity(f"evaluation of {batches.name}", len(sums) * data.size, batches.num_batches)
                if metrics.states.is_due() and metrics.states.fold():
                    return None
            if not sums:  # fewer batches than ranks: take the names of the metrics from any batch, and count nothing
                if uncounted is None:
                    uncounted = _sums(task, step(model, batches.first()), metrics, check=True, counts=False)
                loss, count, pairs = uncounted
                sums = [(loss * 0, count * 0, {name: (total * 0, n * 0) for name, (total, n) in pairs.items()})]
        if stopped and metrics.states.folds_again():
            metrics.states.fold(stopped=True)  # this tells the other ranks
            return None
        slots = range(data.rank, data.rank + len(sums) * data.size, data.size)
        accumulator = MetricAccumulator(world, data, slots, max(batches.num_batches, data.size), function_of(task))
        accumulator.add(sums)
        totals = accumulator.totals(stopped, metrics.states.digest)
        return None if totals is None else metrics.values(totals)


def batches_for(task: Task, evals: Mapping[str, EvalBatches], global_batch_size: int) -> dict[str, EvalBatches]:
    """Return the sets in the batches that the task's loss is of: global ones for a loss over the global batch."""
    if global_loss_of(task) is None:
        return dict(evals)
    return {name: replace(batches, batch_size=global_batch_size) for name, batches in evals.items()}


def chosen_sets(sets: Mapping[str, Any], split: Sequence[str]) -> dict[str, Any]:
    """Return the evaluation sets that `ddpexp evaluate --split` names; without names all but `test`.

    Raises:
        RefusedError: there is no such set, or none but `test`.
    """
    for name in split:
        if name not in sets:
            meant = nearest(name, sets)
            hint = (
                f"Did you mean --split {meant}?" if meant else f"There is {', '.join(sets) or 'none'}.{no_test(name)}"
            )
            raise RefusedError("is not an evaluation set of the data", suggestion=hint, place=f"--split {name}")
    chosen = {name: sets[name] for name in split or sets if split or name != TEST_SET}
    if sets and not chosen:
        raise RefusedError(
            f"the only evaluation set is `{TEST_SET}`, which must be named", suggestion=f"Type --split {TEST_SET}."
        )
    return chosen


def no_test(name: str) -> str:
    """Return a sentence on how a run gets the set `test`, if that is the `name` that was asked for."""
    if name != TEST_SET:
        return ""
    return (
        f" A run evaluates its set `eval` as `{TEST_SET}`, once, at its end, where it was started with "
        "data.validation_fraction=0.1 data.test_set=eval."
    )


def _passes(batches: EvalBatches, data: DataRank, together: bool) -> Iterator[tuple[Any, bool]]:
    """Yield this rank's batches, and whether each counts: `together`, a rank with one batch fewer does another pass."""
    num_own = 0
    for batch in batches:
        yield batch, True
        num_own += 1
    if together and num_own * data.size < batches.num_batches:
        yield batches.first(), False


def _any_rank(flag: bool, world: World) -> bool:
    """Return whether the flag is set on any rank. Ranks: all; communicates."""
    return bool(world.sum(torch.tensor(float(flag), device=world.device)))


def _sums(task: Task, sums: Any, metrics: SetMetrics, check: bool, counts: bool = True) -> Sums:
    """Add what the task has returned for a batch to the metrics; return its pairs of scalars."""
    if check:
        check_sums(sums, function_of(task), trains=False, evaluates=True)
    return detached(metrics.split(sums, counts))


def metric_names(
    task: Task,
    model: Any,
    modules: Mapping[str, nn.Module],
    batch: Any,
    precision: Precision,
    device: torch.device,
    current: CurrentProgress,
    warns: bool = False,
) -> list[str] | None:
    """Return the names of the metrics that an evaluation will have, from a batch of the set.

    Nothing is changed, as in `mean_for_a_sum`. None where the task holds more than plain values, or where its step or
    its `finish` fails, which a single batch may explain; a rank that `warns` says so of a `finish` that fails.
    Ranks: all, for a model may communicate.

    Raises:
        DdpexpError: what the task returns cannot be evaluated, whatever the batch.
    """
    if not holds_plain_values(task):
        return None
    try:
        with unnoticed(modules, device), torch.no_grad():
            tried = deepcopy(task)
            metrics = SetMetrics(tried, World.alone(device), DataRank(0, 1), 1)
            with precision.autocast():
                sums = _sums(tried, step_of(tried, current)(model, batch), metrics, check=True)
            return list(metrics.values(dict.fromkeys(("loss", *sums[2]), (0.0, 1.0))))
    except DdpexpError as error:
        if error.__cause__ is None:
            raise
        if warns and isinstance(error, MetricError):
            logging.getLogger("ddpexp").warning(
                f"{error} This was tried with the first batch of the evaluation set: unless the whole set changes it, "
                "the run ends at its first evaluation"
            )
        return None
    except Exception:  # the evaluation will report it
        return None


def has_eval_metrics(task: Task) -> bool:
    """Return whether an evaluation may have metrics that training does not have."""
    return isinstance(task, HasFinish) or any(map(is_torchmetrics, getattr(task, "__dict__", {}).values()))
