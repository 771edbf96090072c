"""The evaluations of a run: with which weights, what is logged, and whether the metric to keep improved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from ddpexp.data.batches import EvalBatches
from ddpexp.distributed.rng import seed_evaluation
from ddpexp.errors import RefusedError
from ddpexp.loggers.base import Logger
from ddpexp.settings.metrics import TEST_SET
from ddpexp.task import HasOnEval, Sums
from ddpexp.train.average import WeightAverage
from ddpexp.train.average_batch_norm import BatchNormEstimate
from ddpexp.train.evaluate import Evaluator, has_eval_metrics, metric_names
from ddpexp.train.keep_best import check_monitor, unknown_metric, unknown_monitor, with_value
from ddpexp.train.metrics import nonfinite_error
from ddpexp.train.progress import TrainingProgress
from ddpexp.train.run import TrainingRun


@dataclass(frozen=True)
class Evaluation:
    """Evaluates the model of a run on its evaluation sets: the one named `test` at the end, the others on the way."""

    run: TrainingRun
    evals: Mapping[str, EvalBatches]
    logger: Logger
    average: WeightAverage | None = None
    monitored: dict[str, str] = field(default_factory=dict)  # metrics that callbacks read, by the keys that name them

    def monitor(self, key: str, metric: str) -> None:
        """Check that there is an evaluation set of a metric that `key` names, and the metric after the first step.

        Raises:
            RefusedError: there is no such set, or the run makes no evaluations.
        """
        check_monitor(key, metric, self.periodic, self.run.options.eval_every)
        self.monitored[key] = metric

    @property
    def periodic(self) -> Mapping[str, EvalBatches]:
        """Return the sets that are evaluated on the way."""
        return {name: batches for name, batches in self.evals.items() if name != TEST_SET}

    def is_test_due(self, progress: TrainingProgress) -> bool:
        """Return whether a run that ends in this state still has to evaluate its set `test`."""
        if TEST_SET not in self.evals or self.run.options.eval_every == 0:
            return False
        is_done = any(name.startswith(f"{TEST_SET}/") for name in progress.metrics)
        return not (is_done and progress.evaluated_at == progress.step)

    def evaluate(self, step: int, test: bool = False, restored: int | None = None) -> dict[str, float] | None:
        """Evaluate and log; return the metrics as `set/metric`, or None if a stop request ended the evaluation early.

        The set `test` alone is evaluated, or all others. `restored` is the step of the checkpoint that the weights are
        from, and their average, which is used as it is.

        Units: steps done. Ranks: all, with the same result; communicates.

        Raises:
            NonFiniteError: with `trainer.nonfinite=stop`, a loss is not finite.
            MetricError: on all ranks, for a metric that cannot be computed.
        """
        run = self.run
        sets = {TEST_SET: self.evals[TEST_SET]} if test else self.periodic
        run.control.status.set_phase("evaluate")
        run.current.set(max((step if restored is None else restored) - 1, 0))
        if restored is None:
            self.refresh_average()
        weights = nullcontext() if self.average is None else self.average.in_place_of_weights()
        together = run.strategy.evaluates_together
        evaluator = Evaluator(run.task, run.precision, run.world, run.strategy.data, run.control, run.current, together)
        with weights, run.strategy.evaluation() as model:
            metrics = evaluator.evaluate(model, sets)
            if metrics is None:
                return None
            self.logger.scalars(step, run.epoch_after(step), metrics)
            self._check_losses(metrics, step)
            shows = not test or not self.periodic
            takes_part = run.world.is_rank_zero or together  # others have a null logger
            if shows and takes_part and isinstance(run.task, HasOnEval):
                batch = next(iter(sets.values())).first()
                seed_evaluation(0, run.world.device)
                with torch.no_grad():
                    run.task.on_eval(model, batch, self.logger, step)
        return metrics

    def refresh_average(self, estimate: bool = True) -> None:
        """Bring the average up to date; `estimate` the statistics of BatchNorm for it. Ranks: all; communicates."""
        num_batches = self.run.options.average_batch_norm
        if self.average is not None:
            self.average.refresh()
        if self.average is not None and num_batches is not None and estimate:
            BatchNormEstimate(self.run, num_batches).refresh(self.average)

    def improves(self, metrics: Mapping[str, float], progress: TrainingProgress) -> bool:
        """Return whether the metric of trainer.keep_best is among the best so far, and note it in the state.

        Raises:
            UnknownMetricError: the evaluation has no such metric.
        """
        keep_best = self.run.options.keep_best
        if keep_best is None:
            return False
        name = keep_best.partition(":")[2]
        if name not in metrics:
            raise unknown_metric(keep_best, metrics)
        earlier = progress.best if progress.best_of in (None, keep_best) else []  # values of another metric
        best = with_value(keep_best, metrics[name], earlier, self.run.options.keep_best_k)
        if best is not None:
            progress.best, progress.best_of = best, keep_best
        return best is not None

    def check_metrics(self, sums: Sums) -> None:
        """Check after the first step of a start what the evaluations will have, on a batch of them. Ranks: all.

        Nothing is done unless trainer.keep_best names a metric that the task does not return in training, or the task
        has metrics for evaluation only.

        Raises:
            RefusedError: the evaluation will not have the metric of trainer.keep_best.
            DdpexpError: the task returns what cannot be evaluated.
        """
        sets = self.periodic or self.evals
        if not sets or self.run.options.eval_every == 0:
            return
        keep_best = self.run.options.keep_best
        chosen = {} if keep_best is None else {"trainer.keep_best": keep_best.partition(":")[2]}
        known: dict[str, list[str] | None] = {}
        for key, name in ({**chosen, **self.monitored} or {"": f"{next(iter(sets))}/loss"}).items():
            part, _, metric = name.partition("/")
            if part not in sets or (metric in ("loss", *sums[2]) and not has_eval_metrics(self.run.task)):
                continue
            if part not in known:
                known[part] = self._names_of(sets[part])
            names = known[part]
            if not key or names is None or metric in names:
                continue
            names = [f"{part}/{name}" for name in names]
            if key != "trainer.keep_best" or keep_best is None:
                raise unknown_monitor(key, name, names)
            error = unknown_metric(keep_best, names)
            raise RefusedError(error.reason, suggestion=f"Did you mean {error.override}?")

    def _names_of(self, batches: EvalBatches) -> list[str] | None:
        run = self.run
        return metric_names(
            run.task, run.strategy.eval_model, run.strategy.modules, batches.first(), run.precision, run.world.device,
            run.current, warns=run.world.is_rank_zero,
        )  # fmt: skip

    def _check_losses(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            if name.endswith("/loss") and not math.isfinite(value) and self.run.options.nonfinite == "stop":
                raise nonfinite_error(name, value, step)
