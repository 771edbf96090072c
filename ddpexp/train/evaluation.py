"""The evaluations of a run: with which weights, what is logged, and whether the metric to keep improved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from ddpexp.config.schema import Trainer
from ddpexp.data.batches import EvalBatches
from ddpexp.distributed.world import World
from ddpexp.errors import RefusedError
from ddpexp.launch.workers.control import Control
from ddpexp.loggers.base import Logger
from ddpexp.strategy.base import Strategy
from ddpexp.task import HasOnEval, Sums, Task
from ddpexp.train.average import WeightAverage
from ddpexp.train.average_batch_norm import BatchNormEstimate
from ddpexp.train.evaluate import evaluate
from ddpexp.train.keep_best import check_monitor, unknown_metric, unknown_monitor, with_value
from ddpexp.train.metrics import nonfinite_error
from ddpexp.train.precision import Precision
from ddpexp.train.state import TrainState
from ddpexp.train.task_checks import metric_names


@dataclass(frozen=True)
class Evaluation:
    """Evaluates the model of a run on every evaluation set."""

    task: Task
    strategy: Strategy
    evals: Mapping[str, EvalBatches]
    precision: Precision
    world: World
    control: Control
    logger: Logger
    options: Trainer
    average: WeightAverage | None = None
    batch_norm: BatchNormEstimate | None = None  # None: the average is evaluated with the statistics of training
    monitored: dict[str, str] = field(default_factory=dict)  # metrics that callbacks read, by the keys that name them

    def monitor(self, key: str, metric: str) -> None:
        """Check that there is an evaluation set of a metric that `key` names, and the metric after the first step.

        Raises:
            RefusedError: there is no such set, or the run makes no evaluations.
        """
        check_monitor(key, metric, self.evals, self.options.eval_every)
        self.monitored[key] = metric

    def run(self, step: int, epoch: float) -> dict[str, float] | None:
        """Evaluate and log; return the metrics as `set/metric`, or None if a stop request ended the evaluation early.

        Units: steps done. Ranks: all, with the same result; communicates.

        Raises:
            NonFiniteError: with `trainer.nonfinite=stop`, a loss is not finite.
        """
        self.control.set_phase("evaluate")
        self.refresh_average()
        weights = nullcontext() if self.average is None else self.average.in_place_of_weights()
        with weights, self.strategy.evaluation() as model:
            metrics = evaluate(
                self.task, model, self.evals, self.precision, self.world, self.strategy.data, self.control
            )
            if metrics is None:
                return None
            self.logger.scalars(step, epoch, metrics)
            self._check_losses(metrics, step)
            if self.world.is_rank_zero and isinstance(self.task, HasOnEval):
                with torch.no_grad():
                    self.task.on_eval(model, next(iter(self.evals.values())).first(), self.logger, step)
        return metrics

    def refresh_average(self) -> None:
        """Estimate the statistics of BatchNorm for the average, if it has changed. Ranks: all; communicates."""
        if self.average is not None and self.batch_norm is not None:
            self.batch_norm.refresh(self.average)

    def improves(self, metrics: Mapping[str, float], state: TrainState) -> bool:
        """Return whether the metric of trainer.keep_best is among the best so far, and note it in the state.

        Raises:
            UnknownMetricError: the evaluation has no such metric.
        """
        keep_best = self.options.keep_best
        if keep_best is None:
            return False
        name = keep_best.partition(":")[2]
        if name not in metrics:
            raise unknown_metric(keep_best, metrics)
        earlier = state.best if state.best_of in (None, keep_best) else []  # values of another metric
        best = with_value(keep_best, metrics[name], earlier, self.options.keep_best_k)
        if best is not None:
            state.best, state.best_of = best, keep_best
        return best is not None

    def check_metrics(self, sums: Sums) -> None:
        """Check after the first step of a start that the evaluation will have the metric of trainer.keep_best.

        If the task does not return it in training, it is asked for the first batch of the evaluation set. Ranks: all.

        Raises:
            RefusedError: the evaluation will not have it.
        """
        best = self.options.keep_best
        if best is not None and (names := self._names_without(best.partition(":")[2], sums)) is not None:
            error = unknown_metric(best, names)
            raise RefusedError(f"{error} Did you mean {error.override}?")
        for key, name in self.monitored.items():
            if (names := self._names_without(name, sums)) is not None:
                raise unknown_monitor(key, name, names)

    def _names_without(self, name: str, sums: Sums) -> list[str] | None:
        """Return the metrics of the evaluation set that `name` names, if it is not among them."""
        chosen, _, metric = name.partition("/")
        if chosen not in self.evals or metric in ("loss", *sums[2]):
            return None
        names = metric_names(
            self.task, self.strategy.eval_model, self.strategy.modules, self.evals[chosen].first(), self.precision,
            self.world.device,
        )  # fmt: skip
        return None if names is None or metric in names else [f"{chosen}/{name}" for name in names]

    def _check_losses(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            if name.endswith("/loss") and not math.isfinite(value) and self.options.nonfinite == "stop":
                raise nonfinite_error(name, value, step)
