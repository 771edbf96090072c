"""The evaluations of a run: with which weights, what is logged, and whether the metric to keep improved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from ddpexp.config.schema import Trainer
from ddpexp.data.batches import EvalBatches
from ddpexp.distributed.world import World
from ddpexp.errors import RefusedError
from ddpexp.launch.workers.control import Control
from ddpexp.loggers.base import Logger
from ddpexp.strategy.base import Strategy
from ddpexp.task import HasOnEval, Sums, Task
from ddpexp.train.ema import EMA
from ddpexp.train.evaluate import evaluate, has_metrics_of_its_own, metric_names
from ddpexp.train.keep_best import is_better, unknown_metric
from ddpexp.train.metrics import nonfinite_error
from ddpexp.train.precision import Precision
from ddpexp.train.state import TrainState


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
    ema: EMA | None = None

    def run(self, step: int, epoch: float) -> dict[str, float] | None:
        """Evaluate and log; return the metrics as `set/metric`, or None if a stop request ended the evaluation early.

        Units: steps done. Ranks: all, with the same result; communicates.

        Raises:
            NonFiniteError: with `trainer.nonfinite=stop`, a loss is not finite.
        """
        self.control.set_phase("evaluate")
        weights = nullcontext() if self.ema is None else self.ema.in_place_of_weights()
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

    def improves(self, metrics: Mapping[str, float], state: TrainState) -> bool:
        """Return whether the metric of trainer.keep_best is better than before, and note it in the state.

        Raises:
            UnknownMetricError: the evaluation has no such metric.
        """
        if self.options.keep_best is None:
            return False
        name = self.options.keep_best.partition(":")[2]
        if name not in metrics:
            raise unknown_metric(self.options.keep_best, metrics)
        improved = is_better(self.options.keep_best, metrics[name], state.best)
        if improved:
            state.best = metrics[name]
        return improved

    def check_metrics(self, sums: Sums) -> None:
        """Check after the first step of a start that the evaluation will have the metric of trainer.keep_best.

        If the task does not return it in training, it is asked for the first batch of the evaluation set. Ranks: all.

        Raises:
            RefusedError: the evaluation will not have it.
        """
        if self.options.keep_best is None:
            return
        name = self.options.keep_best.partition(":")[2]
        chosen, _, metric = name.partition("/")
        if chosen not in self.evals or metric in ("loss", *sums[2]):
            return
        names = metric_names(
            self.task, self.strategy.eval_model, self.strategy.modules, self.evals[chosen].first(), self.precision,
            self.world.device,
        )  # fmt: skip
        if names is not None and metric not in names:
            error = unknown_metric(self.options.keep_best, [f"{chosen}/{name}" for name in names])
            raise RefusedError(f"{error} Did you mean {error.override}?")

    def _check_losses(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            if name.endswith("/loss") and not math.isfinite(value) and self.options.nonfinite == "stop":
                raise nonfinite_error(name, value, step)
