"""The run loop: optimizer steps, their records, evaluations and checkpoints.

It knows neither launchers nor strategies by name; whatever depends on them goes through the objects it is given.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from ddpexp.data.batches import EvalBatches, units_per_sample
from ddpexp.data.streams import Batches, StreamBatches
from ddpexp.distributed.world import World
from ddpexp.launch.workers.control import Control, What
from ddpexp.loggers.base import Logger
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.base import Strategy
from ddpexp.strategy.options import Compilation
from ddpexp.system.fault_injection import fault_point
from ddpexp.task import Schedule, Sums, Task
from ddpexp.train.average import WeightAverage
from ddpexp.train.callbacks.base import RunView
from ddpexp.train.callbacks.hooks import Callbacks
from ddpexp.train.compare_replicas import ReplicaComparison
from ddpexp.train.core_wait import core_wait_hint
from ddpexp.train.due import NOTHING, Due, next_due
from ddpexp.train.evaluation import Evaluation
from ddpexp.train.freezing import LateStarts
from ddpexp.train.keep_best import UnknownMetricError
from ddpexp.train.learning_rates import LearningRates
from ddpexp.train.metrics import Clock, MetricAccumulator, MetricError, nonfinite_error
from ddpexp.train.optimizer_step import Step
from ddpexp.train.optimizers import OptimizerStates, parameter_names
from ddpexp.train.precision import Precision
from ddpexp.train.progress import Outcome, Progress
from ddpexp.train.states import (
    AverageCount,
    CallbackStates,
    LocalBuffers,
    Models,
    Modules,
    Saves,
    Stateful,
    States,
    StreamPositions,
)
from ddpexp.train.task_checks import warn_of_a_mean


@dataclass
class Loop:
    """Everything a run consists of; `fit` trains."""

    task: Task
    strategy: Strategy
    optimizers: Mapping[str, Optimizer]
    schedule: Schedule
    precision: Precision
    world: World
    train: Batches
    evals: Mapping[str, EvalBatches]
    logger: Logger
    control: Control
    options: Trainer
    num_steps: int
    checkpointer: Saves | None = None
    average: WeightAverage | None = None
    callbacks: Callbacks = field(default_factory=Callbacks)
    further_states: States = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    stopped: str | None = None  # why the run ends after this step; set on all ranks at once, anew in each start
    states: dict[str, Stateful] = field(init=False)  # what checkpoints hold, by name
    _rates: LearningRates = field(init=False)
    _step: Step = field(init=False)
    _evaluation: Evaluation = field(init=False)
    _comparison: ReplicaComparison = field(init=False)
    _metrics: MetricAccumulator = field(init=False)  # of the steps since the last record
    _clock: Clock = field(init=False)
    _units_per_sample: Mapping[str, int] = field(init=False)
    _first_step_at: float = field(init=False, default=math.nan)
    _next_due: int = field(init=False, default=0)  # nothing follows the steps before it
    _save_requested: bool = field(init=False, default=False)  # by a callback, on all ranks at once

    def __post_init__(self) -> None:
        """Build what the steps, the records and the evaluations need, before a checkpoint changes anything."""
        self._units_per_sample = units_per_sample(self.train.data)
        self._rates = LearningRates(self.optimizers, self.schedule, self.num_steps, self.train.steps_per_epoch)
        self._step = Step(
            self.task, self.strategy, self.precision, self.optimizers, self.world, self.control, self.train.plan,
            self.options.seed, self.options.reduction, self.options.clip_grad_norm, self.options.clip_grad_value,
            self.num_steps, Compilation.records_graphs(self.options),
            self.callbacks.call_on_gradients if self.callbacks.on_gradients else None,
            LateStarts.of(self.options, self.strategy.modules, self.strategy.single),
        )  # fmt: skip
        self._comparison = ReplicaComparison(self.strategy, self.world)
        self._evaluation = Evaluation(
            self.task, self.strategy, self.evals, self.precision, self.world, self.control, self.logger, self.options,
            self.train, self.average,
        )  # fmt: skip
        self._metrics, self._clock = self._new_accumulator(), Clock()
        self.states = {
            "models": Models(self.strategy, self.average, self.world),
            "optimizers": OptimizerStates(self.optimizers, self.strategy),
            "progress": self.progress,
            "progress/window": self._metrics,
            "progress/schedule": self._rates,
            "progress/averaged": AverageCount(self.average),
            "progress/precision": self.precision,
            "modules": Modules(self.strategy),
            "clock": self._clock,
            "rank/buffers": LocalBuffers(self.strategy, self.world),
            "rank/callbacks": CallbackStates(self.callbacks, self.world),
            **self.further_states,
        }
        if isinstance(self.train, StreamBatches):
            self.states["rank/stream"] = StreamPositions(self.train, self.strategy)

    def fit(self) -> Outcome:
        """Train from the current step to the last one; record, evaluate and save on the way.

        Ranks: all, in step with one another.

        Raises:
            NonFiniteError: with `trainer.nonfinite=stop`, a loss that is not finite; on all ranks alike.
        """
        self._start()
        interrupted = self._evaluate_before_steps()
        self._prepare_for_data()
        for step, micro_batches in enumerate(self._remaining_steps(interrupted), start=self.progress.step):
            self.control.set_phase("train")
            self._rates.set(step)
            due = self._due_after(step + 1)
            self._train_step(step, micro_batches, due)
            if due.record:
                self._record()
            improved = False
            if due.evaluation:
                interrupted, improved = self._evaluate()
            if due.is_last or interrupted or self.stopped is not None:
                break
            request = self._poll()
            interrupted = request == "stop"
            if request == "end":
                self.stopped = self._out_of_time()
            if interrupted or self.stopped is not None:
                break
            if due.checkpoint or improved or self._save_requested or request == "save":
                self._save(end=False)
            self._wait_for_data()
        return self._finish(interrupted)

    def _start(self) -> None:
        limit = self.options.max_seconds
        if self._rates.monitor is not None:
            self._evaluation.monitor("scheduler.monitor", self._rates.monitor)
        self._clock.start()
        self.stopped = self.callbacks.stopped or self.stopped
        if limit is not None and self._clock.elapsed_before >= limit and self.progress.step < self.num_steps:
            self.stopped = self._out_of_time()
        if self.callbacks.members:
            self.callbacks.start(RunView(
                self.num_steps, self.options, self.world, self.train, self.strategy.modules, self.optimizers,
                self.logger, self.callbacks.requests, self.progress, self._step, self._evaluation.monitor,
                parameter_names(self.strategy.modules), self.strategy.shard,
            ))  # fmt: skip

    def _new_accumulator(self) -> MetricAccumulator:
        """Return an accumulator with a slot per micro-batch of the global batch, or per rank for a manual task."""
        data, manual, copies = self.strategy.data, self._step.manual, Compilation.records_graphs(self.options)
        if manual is not None:
            return MetricAccumulator(self.world, data, [data.rank], data.size, manual.train_step, copies)
        num_micro_batches = self.train.plan.gradient_accumulation_steps
        first = data.rank * num_micro_batches
        slots = range(first, first + num_micro_batches)
        return MetricAccumulator(self.world, data, slots, num_micro_batches * data.size, self.task.step, copies, True)

    def _evaluate_before_steps(self) -> bool:
        """Evaluate at step 0 if configured, or redo an interrupted evaluation; return whether it was interrupted."""
        progress = self.progress
        sets = self._evaluation.periodic
        at_start = self.options.eval_at_start and progress.step == 0 and progress.evaluated_at is None and bool(sets)
        if not at_start and progress.evaluated:
            return False
        interrupted, improved = self._evaluate()
        if at_start and improved:
            self._save(end=False)
        return interrupted

    def _remaining_steps(self, interrupted: bool) -> Iterable[list[Any]]:
        return () if interrupted or self.stopped is not None else self.train.steps(self.progress.step, self.num_steps)

    def _prepare_for_data(self) -> None:
        self.strategy.train(True)
        self.control.set_phase("data")

    def _wait_for_data(self) -> None:
        self.control.set_phase("data")
        fault_point("data")

    def _due_after(self, step: int) -> Due:
        if self.checkpointer is not None:
            self.checkpointer.check()
        if step < self._next_due:
            return NOTHING
        due = Due.after(step, self.num_steps, self.train.steps_per_epoch, self.options)
        self._next_due = next_due(step, self.num_steps, self.train.steps_per_epoch, self.options)
        if due.evaluation or due.checkpoint:
            return due._replace(
                evaluation=due.evaluation and bool(self._evaluation.periodic),
                checkpoint=due.checkpoint and self.checkpointer is not None,
            )
        return due

    def _poll(self) -> What | None:
        """Return what all ranks do now. Ranks: all; of the times rank zero's count, since clocks differ."""
        every, limit = self.options.checkpoint_every_seconds, self.options.max_seconds
        save = self.callbacks.failed
        if every is not None and self.checkpointer is not None and self._clock.since_save() > every:
            save = True
        end = limit is not None and self._clock.elapsed() >= limit
        return self.control.poll(self.progress.step, save, end)

    def _out_of_time(self) -> str:
        limit = f"trainer.max_seconds={self.options.max_seconds:.15g}"
        return f"{limit} reached after step {self.progress.step:,} of {self.num_steps:,}"

    def _train_step(self, step: int, micro_batches: list[Any], due: Due) -> None:
        """Do one optimizer step, and count it."""
        self._step.want_norm = due.record or due.checkpoint  # the norm is recorded, or checked before saving
        sums = self._step.run(step, micro_batches)
        self._metrics.add(sums)
        self.progress.step = self.control.step = step + 1
        if self.average is not None:
            self.average.update(step + 1, self._step.moved)
        if self.callbacks.on_step:
            self.callbacks.call("on_step", self.callbacks.on_step)
        fault_point("step")
        if math.isnan(self._first_step_at):
            self._first_step_at = time.time()
            with self._clock.paused():
                self._check_first_step(step, sums[-1], micro_batches[0])
        elif due.comparison:
            self._comparison.compare(step + 1)

    def _check_first_step(self, step: int, sums: Sums, batch: Any) -> None:
        """Check the task and the ranks by the first step of a start. Ranks: all; communicates."""
        self._comparison.compare(step + 1)
        if self.world.is_rank_zero and (hint := core_wait_hint()):
            logging.getLogger("ddpexp").info(hint)
        # Blocks run as they are written: for a check they would be compiled once more.
        with nullcontext() if self.options.compile_blocks is None else torch.compiler.set_stance("force_eager"):
            self._evaluation.check_metrics(sums)
            # A rank whose batch the task refuses would leave the others waiting in a forward pass that communicates.
            if step == 0 and self._step.manual is None and not self.strategy.forward_communicates:
                warn_of_a_mean(self.task, self.strategy, batch, self.precision, self.world)

    def _record(self) -> None:
        """Log the means since the last record. Ranks: all; communicates."""
        self._step.check()
        num_steps = len(self._metrics)
        stop = self.options.nonfinite == "stop"
        means = self._metrics.reduce(self.progress.step - num_steps + 1, stop, self.callbacks.pending)
        values = {f"train/{name}": value for name, value in means.items()}
        values |= {f"train/lr{suffix}": rate for suffix, rate in self._rates.recorded().items()} | self._check_norms()
        speed = num_steps * self.train.samples_per_step / self._clock.lap()
        values |= {f"train/{name}_per_second": speed * number for name, number in self._units_per_sample.items()}
        fault_point("record")
        self.logger.scalars(self.progress.step, self._epoch(), values)
        if self._metrics.flagged:
            self._follow_requests()

    def _follow_requests(self) -> None:
        """Do what callbacks of any rank have requested. Ranks: all; communicates."""
        self.callbacks.agree()
        if self.callbacks.failed:
            self._save(end=False)
        self.callbacks.raise_error("")  # without a checkpointer
        requests = self.callbacks.taken()
        self._save_requested = requests.save
        if requests.stop is not None and self.stopped is None and self.progress.step < self.num_steps:
            self.stopped = self.callbacks.stopped = requests.stop

    def _evaluate(self) -> tuple[bool, bool]:
        """Evaluate and log; return whether a stop request ended it early, and whether the metric to keep improved.

        Ranks: all, with the same result; communicates.
        """
        metrics = self._run_evaluation(test=False)
        self.progress.evaluated = metrics is not None
        if metrics is None:
            return True, False
        self.progress.metrics, self.progress.evaluated_at = metrics, self.progress.step
        self._rates.observe(metrics, self.progress.step)
        try:
            improved = self._evaluation.improves(metrics, self.progress)
        except UnknownMetricError:
            self._save(end=False)  # no step so far is lost
            raise
        if self.callbacks.members:
            self.callbacks.call("on_evaluated", self.callbacks.on_evaluated, dict(metrics))
            if self.callbacks.any_pending():
                self._follow_requests()
        self.control.set_phase("train")
        return False, improved

    def _evaluate_test(self) -> bool:
        """Evaluate the set `test` at the end of the run, unless that is done; return whether a stop interrupted it."""
        progress = self.progress
        if not self._evaluation.is_test_due(progress):
            return False
        metrics = self._run_evaluation(test=True)
        if metrics is not None:
            others = progress.metrics if progress.evaluated_at == progress.step else {}
            progress.metrics, progress.evaluated_at = {**others, **metrics}, progress.step
        return metrics is None

    def _run_evaluation(self, test: bool) -> dict[str, float] | None:
        try:
            with self._clock.paused():
                return self._evaluation.run(self.progress.step, self._epoch(), test)
        except MetricError:
            self.progress.evaluated = test and self.progress.evaluated
            self._save(end=False)  # no step so far is lost, and a resume evaluates again
            raise

    def _save(self, end: bool, interrupted: bool = False) -> str | None:
        """Save a checkpoint; at the end return the hash of the weights. Ranks: all; communicates."""
        if self.checkpointer is None:
            return None
        self.control.set_phase("save")
        fault_point("save")
        self._save_requested = False
        if self.callbacks.any_pending():
            self.callbacks.agree()
        with self._clock.paused():
            self._step.check()
            self._check_finite()
            self._comparison.compare(self.progress.step)
            self._evaluation.refresh_average(estimate=not interrupted)  # else the time is limited
            digest = self.checkpointer.save(self.states, self.progress, self._epoch(), end)
        self._clock.saved()
        if self.callbacks.failed:
            self.checkpointer.finish()  # no step so far is lost
            self.world.barrier()
            self.callbacks.raise_error(f"Step {self.progress.step} is saved: correct the callback, or leave it out.")
        return digest

    def _finish(self, interrupted: bool) -> Outcome:
        if self.stopped is not None and not interrupted:
            interrupted = self._complete_early_end()
        if not interrupted:
            interrupted = self._evaluate_test()
        if not interrupted:
            self.callbacks.end()
        digest = self._save(end=True, interrupted=interrupted)
        progress = self.progress
        return Outcome(
            progress.step, self._epoch(), progress.metrics, self._clock.total(), self._clock.elapsed(),
            self._first_step_at, interrupted, digest, None if interrupted else self.stopped,
        )  # fmt: skip

    def _complete_early_end(self) -> bool:
        """Record and evaluate as after the last step, unless that is done; return whether a stop interrupted it."""
        progress = self.progress
        if len(self._metrics):
            self._rates.set(progress.step - 1)
            self._record()
        if not self._evaluation.periodic or self.options.eval_every == 0 or progress.evaluated_at == progress.step:
            return False
        return self._evaluate()[0]

    def _epoch(self) -> float:
        return self.progress.step / self.train.steps_per_epoch

    def _check_finite(self) -> None:
        """Refuse to checkpoint a diverged run. Ranks: all; communicates.

        Raises:
            NonFiniteError: with `trainer.nonfinite=stop`, a loss since the last record, or the gradient, is not finite.
        """
        if self.options.nonfinite == "stop":
            self._metrics.check_finite(self.progress.step - len(self._metrics) + 1)
            self._check_norms()

    def _check_norms(self) -> dict[str, float]:
        """Return the gradient norms of the last step as they are recorded."""
        norms = {f"train/grad_norm{suffix}": float(norm) for suffix, norm in self._step.norms.items()}
        bad = next((name for name, norm in norms.items() if not math.isfinite(norm)), None)
        if bad is not None and self.options.nonfinite == "stop" and not self.precision.skips:
            raise nonfinite_error(bad, norms[bad], self.progress.step)
        return norms
