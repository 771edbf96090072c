"""The run loop: optimizer steps, their records, evaluations and checkpoints.

It knows neither launchers nor strategies by name; whatever depends on them goes through the objects it is given.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ddpexp.data.batches import EvalBatches, units_per_sample
from ddpexp.data.streams import StreamBatches
from ddpexp.distributed.phases import CHECKPOINT, DATA, EVALUATION, FORWARD, RECORD
from ddpexp.launch.workers.page import What
from ddpexp.loggers.base import Logger
from ddpexp.strategy.options import Compilation
from ddpexp.system.fault_injection import fault_point
from ddpexp.task import Sums
from ddpexp.train.average import WeightAverage
from ddpexp.train.callbacks.base import RunView
from ddpexp.train.callbacks.hooks import Callbacks
from ddpexp.train.collectives import TaskCollectives
from ddpexp.train.compare_replicas import ReplicaComparison
from ddpexp.train.compiled_step import CompiledStep
from ddpexp.train.core_wait import core_wait_hint
from ddpexp.train.due import INTERRUPTED, NOTHING, NOTHING_ASKED, Asked, Due, End, next_due
from ddpexp.train.evaluation import Evaluation
from ddpexp.train.keep_best import UnknownMetricError
from ddpexp.train.learning_rates import LearningRates
from ddpexp.train.memory_growth import GrowthWatch, point_of
from ddpexp.train.metrics import Clock, MetricAccumulator, MetricError, nonfinite_error
from ddpexp.train.optimizer_step import Step
from ddpexp.train.optimizers import OptimizerStates, parameter_names
from ddpexp.train.profiler import Profiler
from ddpexp.train.progress import Outcome, TrainingProgress
from ddpexp.train.run import TrainingRun
from ddpexp.train.states import (
    AverageCount,
    CallbackStates,
    LocalBuffers,
    ModelStates,
    ModuleStates,
    Saves,
    Stateful,
    States,
    StreamPositions,
)
from ddpexp.train.step_times import NOBODY, SLOW_RANK, StepTimes, TimesRecorder
from ddpexp.train.task_checks import warn_of_a_mean
from ddpexp.train.task_step import function_of
from ddpexp.train.usage import UsageMeter, slow_gpu, usage_columns
from ddpexp.train.utilization import Utilization


class Loop:
    """Trains a run with `fit`.

    Attributes:
        progress: How far the run is.
        states: What checkpoints hold, by name.
        dependent: A sentence on a collective by which the task's step depends on the number of workers; or empty.
    """

    def __init__(
        self,
        run: TrainingRun,
        evals: Mapping[str, EvalBatches],
        logger: Logger,
        checkpointer: Saves | None = None,
        average: WeightAverage | None = None,
        callbacks: Callbacks | None = None,
        further_states: States | None = None,
        utilization: Utilization | None = None,
    ) -> None:
        """Build what the steps, the records and the evaluations need, before a checkpoint changes anything."""
        self.run = run
        self.evals = evals
        self.logger = logger
        self.checkpointer = checkpointer
        self.average = average
        self.callbacks = callbacks = callbacks or Callbacks()
        self.utilization = utilization
        self.progress = TrainingProgress()
        self.dependent = ""
        self._units_per_sample = units_per_sample(run.train.data, getattr(run.train, "order", None))
        self._rates = LearningRates(run.optimizers, run.schedule, run.num_steps, run.train.steps_per_epoch)
        kind = CompiledStep if run.options.compile_step else Step
        self._step = kind(run, callbacks.call_on_gradients if callbacks.on_gradients else None)
        self._comparison = ReplicaComparison(run.strategy, run.world)
        self._evaluation = Evaluation(run, evals, logger, average)
        self._metrics = self._new_accumulator()  # of the steps since the last record
        self._clock = clock = Clock()
        self._profiler = Profiler(run, clock)
        self._times = run.world.times
        self._times_recorder = TimesRecorder()
        self._usage = UsageMeter(run.world.device)
        self._growth = GrowthWatch(run.world.local_world_size, run.num_steps)
        self._first_step_at: float | None = None
        timed = run.options.checkpoint_every_seconds, run.options.max_seconds
        self._may_wish = timed != (None, None) or bool(callbacks.members)
        self._next_due = 0  # nothing is due after the steps before it
        self.states: dict[str, Stateful] = {
            "models": ModelStates(run.strategy, average, run.world),
            "optimizers": OptimizerStates(run.optimizers, run.strategy),
            "progress": self.progress,
            "progress/window": self._metrics,
            "progress/schedule": self._rates,
            "progress/averaged": AverageCount(average),
            "progress/precision": run.precision,
            "modules": ModuleStates(run.strategy),
            "clock": self._clock,
            "rank/buffers": LocalBuffers(run.strategy, run.world),
            "rank/callbacks": CallbackStates(callbacks, run.world),
            **(further_states or {}),
        }
        if isinstance(run.train, StreamBatches):
            self.states["rank/stream"] = StreamPositions(run.train, run.strategy)

    def fit(self) -> Outcome:
        """Train from the current step to the last one; record, evaluate and save on the way.

        Ranks: all, in step with one another.

        Raises:
            NonFiniteError: with `trainer.nonfinite=stop`, a loss that is not finite; on all ranks alike.
        """
        with self._collectives_watched():
            try:
                return self._fit()
            finally:
                self._profiler.discard()  # nothing, unless an error or an interruption ends the run within its steps

    def _fit(self) -> Outcome:
        asked = self._start()
        poll, set_phase = self.run.control.poll, self.run.control.status.set_phase
        for step, micro_batches in self._remaining_steps(asked):
            set_phase("train")
            due = self._due_after(step + 1)
            self._train_step(step, micro_batches, due)
            asked = NOTHING_ASKED
            if due is not NOTHING:
                asked = self._observe(due)
                if due.is_last or asked.end is not None:
                    break
            answer = poll(step + 1) if not self._may_wish else poll(step + 1, *self._wishes())
            if answer is not None:
                asked = self._follow(answer, asked)
            if due is not NOTHING or answer is not None:
                if asked.end is not None:
                    break
                self._act(due, asked)
            self._times.begin(DATA)
            set_phase("data")
        return self._finish(asked.end)

    def _observe(self, due: Due) -> Asked:
        """Do what is due of comparisons, profiles, records and evaluations after a step; return what follows."""
        self.run.control.status.step = self.progress.step
        if due.comparison:
            self._comparison.compare(self.progress.step)
        self._profiler.end(self.progress.step)
        asked = NOTHING_ASKED
        if due.record:
            asked |= self._record()
        if due.evaluation:
            asked |= self._evaluate()
        return asked

    def _act(self, due: Due, asked: Asked) -> None:
        """Save, and begin a profile, if that is due or asked for."""
        if due.checkpoint or asked.save:
            self._save(end=False)
        self._begin_profile(asked.profile)

    def _begin_profile(self, requested: int = 0) -> None:
        step = self.progress.step
        self._profiler.begin(step, requested, self.run.num_steps)
        self._next_due = min(self._next_due, self._profiler.next_after(step))

    def _collectives_watched(self) -> AbstractContextManager[None]:
        """Watch what the task's functions call; one worker alone has no collectives."""
        run = self.run
        if run.world.world_size == 1:
            return nullcontext()
        plan = run.train.plan
        sizes = plan.micro_batch_size, plan.global_batch_size // plan.data_size
        return TaskCollectives(run.task, run.strategy.modules, sizes, self._tell_dependent).watched()

    def _tell_dependent(self, sentence: str) -> None:
        self.dependent = sentence
        if self.run.world.is_rank_zero:
            logging.getLogger("ddpexp").warning(sentence)
        self.logger.text("collectives", sentence)

    def _start(self) -> Asked:
        """Start the clock and the callbacks, and evaluate at step 0 if configured; return what follows."""
        run = self.run
        limit = run.options.max_seconds
        if self._rates.monitor is not None:
            self._evaluation.monitor("scheduler.monitor", self._rates.monitor)
        self._clock.start()
        asked = NOTHING_ASKED
        if limit is not None and self._clock.elapsed_before >= limit and self.progress.step < run.num_steps:
            asked = Asked(end=self._out_of_time())
        elif self.callbacks.stopped is not None:
            asked = Asked(end=End(self.callbacks.stopped))
        if self.callbacks.members:
            names = parameter_names(run.strategy.modules)
            self.callbacks.start(
                RunView(
                    run,
                    self.callbacks.requests,
                    self.logger,
                    self.progress,
                    self._step,
                    self._evaluation.monitor,
                    names,
                )
            )
        asked |= self._evaluate_before_steps()
        if asked.end is None and self.progress.step < run.num_steps:
            self._profiler.say_if_past(self.progress.step)
            self._begin_profile()
        run.strategy.train(True)
        self._times.begin(DATA)
        run.control.status.set_phase("data")
        return asked

    def _new_accumulator(self) -> MetricAccumulator:
        """Return an accumulator with a slot per micro-batch of the global batch, or per rank for a manual task."""
        run = self.run
        data = run.strategy.data
        manual = self._step.manual
        copies = Compilation.records_graphs(run.options)
        if manual is not None:
            return MetricAccumulator(run.world, data, [data.rank], data.size, manual.train_step, copies)
        num_micro_batches = run.train.plan.gradient_accumulation_steps
        first = data.rank * num_micro_batches
        slots = range(first, first + num_micro_batches)
        numbers = self._step.loss_counts.numbers
        return MetricAccumulator(
            run.world, data, slots, num_micro_batches * data.size, function_of(run.task), copies, numbers
        )

    def _evaluate_before_steps(self) -> Asked:
        """Evaluate at step 0 if configured, or redo an interrupted evaluation."""
        progress = self.progress
        is_first = progress.step == 0 and progress.evaluated_at is None
        at_start = self.run.options.eval_at_start and is_first and bool(self._evaluation.periodic)
        if not at_start and progress.evaluated:
            return NOTHING_ASKED
        asked = self._evaluate()
        if asked.save and asked.end is None:
            self._save(end=False)
        return asked

    def _remaining_steps(self, asked: Asked) -> Iterable[tuple[int, list[Any]]]:
        """Return the numbers and the micro-batches of the steps to do. Units: steps, from 0."""
        begin = self.progress.step
        return () if asked.end is not None else enumerate(self.run.train.steps(begin, self.run.num_steps), start=begin)

    def _due_after(self, step: int) -> Due:
        if self.checkpointer is not None:
            self.checkpointer.check()
        if step < self._next_due:
            return NOTHING
        run = self.run
        due = Due.after(step, run.num_steps, run.train.steps_per_epoch, run.options)
        next_of_periods = next_due(step, run.num_steps, run.train.steps_per_epoch, run.options)
        self._next_due = min(next_of_periods, self._profiler.next_after(step))
        if due.evaluation or due.checkpoint:
            return due._replace(
                evaluation=due.evaluation and bool(self._evaluation.periodic),
                checkpoint=due.checkpoint and self.checkpointer is not None,
            )
        return due

    def _follow(self, answer: What, asked: Asked) -> Asked:
        """Return the requests with the answer of the commands, which all ranks follow. Ranks: all."""
        if answer == "end":
            return Asked(end=self._out_of_time())
        if answer == "stop":
            return INTERRUPTED
        return asked | Asked(save=answer == "save", profile=self.run.control.profile_steps)

    def _wishes(self) -> tuple[bool, bool]:
        """Return whether to request a save, and the end of the run. Ranks: zero's count, since clocks differ."""
        every, limit = self.run.options.checkpoint_every_seconds, self.run.options.max_seconds
        save = every is not None and self.checkpointer is not None and self._clock.since_save() > every
        return save or self.callbacks.failed, limit is not None and self._clock.elapsed() >= limit

    def _out_of_time(self) -> End:
        limit = f"trainer.max_seconds={self.run.options.max_seconds:.15g}"
        return End(f"{limit} reached after step {self.progress.step:,} of {self.run.num_steps:,}")

    def _train_step(self, step: int, micro_batches: list[Any], due: Due) -> None:
        """Do one optimizer step, and count it."""
        self._times.begin(FORWARD)
        self._rates.set(step)
        sums = self._step.take(step, micro_batches, with_norm=due is not NOTHING)  # recorded, or checked
        self._metrics.add(sums)
        self.progress.step = step + 1
        if self.average is not None:
            self.average.update(step + 1, self._step.moved)
        if self.callbacks.on_step:
            self.callbacks.call("on_step", self.callbacks.on_step)
        fault_point("step")
        self._times.end_step()
        if self._first_step_at is None:
            self._first_step_at = time.time()
            with self._clock.paused():
                self._check_first_step(step, sums[-1], micro_batches[0])
            self._times.start(self.run.world.device)

    def _check_first_step(self, step: int, sums: Sums, batch: Any) -> None:
        """Check the task and the ranks by the first step of a start. Ranks: all; communicates."""
        run = self.run
        self._comparison.compare(step + 1)
        if run.world.is_rank_zero and (hint := core_wait_hint()):
            logging.getLogger("ddpexp").info(hint)
        # Blocks run as they are written: for a check they would be compiled once more.
        with nullcontext() if run.options.compile_blocks is None else torch.compiler.set_stance("force_eager"):
            self._evaluation.check_metrics(sums)
            # A rank whose batch the task refuses would leave the others waiting in a forward pass that communicates.
            if step == 0 and self._step.manual is None and not run.strategy.forward_communicates:
                warn_of_a_mean(run, batch)

    def _record(self) -> Asked:
        """Log the means since the last record; return what callbacks have requested. Ranks: all; communicates."""
        with self._times.apart(RECORD):
            self._log_means()
            return self._requested() if self._metrics.flagged else NOTHING_ASKED

    def _log_means(self) -> None:
        run = self.run
        self._step.check()
        num_steps = len(self._metrics)
        stop = run.options.nonfinite == "stop"
        own = self._own_measures if self._times.started else None
        means = self._metrics.reduce(self.progress.step - num_steps + 1, stop, self.callbacks.pending, own)
        values = {f"train/{name}": value for name, value in means.items()}
        values |= {f"train/lr{suffix}": rate for suffix, rate in self._rates.recorded().items()} | self._check_norms()
        speed = num_steps * run.train.samples_per_step / self._clock.lap()
        values |= {f"train/{name}_per_second": speed * number for name, number in self._units_per_sample.items()}
        if self.utilization is not None:
            values |= self.utilization.column(speed)
        if self._metrics.of_ranks and run.world.is_rank_zero:  # whose loggers record
            values |= self._measured(self._metrics.of_ranks)
        fault_point("record")
        self.logger.scalars(self.progress.step, run.epoch_after(self.progress.step), values)

    def _own_measures(self) -> list[float]:
        times = StepTimes(self.run.strategy.stage, *self._times.take())
        return [*self._usage.row(), *times.row(self.run.world.world_size)]

    def _measured(self, rows: Sequence[Sequence[float]]) -> dict[str, float]:
        """Return what a record says of the times and the memory of all ranks, by the numbers that each has passed.

        Ranks: zero.
        """
        names = self._usage.names
        usage = [row[: len(names)] for row in rows]
        values = self._times_recorder.record([StepTimes.of(row[len(names) :]) for row in rows])
        slow = int(values.get(SLOW_RANK, NOBODY))
        if slow >= 0:
            values |= slow_gpu(names, usage[slow])
        values |= usage_columns(names, usage)
        record = {"step": self.progress.step, "epoch": self.run.epoch_after(self.progress.step), **values}
        if (point := point_of(record)) is not None and (sentence := self._growth.add(point)):
            logging.getLogger("ddpexp").warning(sentence)
        return values

    def _requested(self) -> Asked:
        """Return what callbacks of any rank have requested. Ranks: all; communicates."""
        callbacks = self.callbacks
        callbacks.agree()
        if callbacks.failed:
            self._save(end=False)
        callbacks.raise_error("")  # without a checkpointer
        requests = callbacks.taken()
        if requests.stop is None or self.progress.step == self.run.num_steps:
            return Asked(requests.save)
        if callbacks.stopped is None:
            callbacks.stopped = requests.stop
        return Asked(requests.save, End(callbacks.stopped))

    def _evaluate(self) -> Asked:
        """Evaluate and log; return whether that was interrupted, and whether the metric to keep improved.

        Ranks: all, with the same result; communicates.
        """
        callbacks = self.callbacks
        with self._saved_on_error(test=False), self._clock.paused(), self._times.apart(EVALUATION):
            metrics = self._evaluation.evaluate(self.progress.step)
        self.progress.evaluated = metrics is not None
        if metrics is None:
            return INTERRUPTED
        self.progress.metrics, self.progress.evaluated_at = metrics, self.progress.step
        self._rates.observe(metrics, self.progress.step)
        try:
            asked = Asked(save=self._evaluation.improves(metrics, self.progress))
        except UnknownMetricError:
            self._save(end=False)  # no step so far is lost
            raise
        if callbacks.members:
            callbacks.call("on_evaluated", callbacks.on_evaluated, dict(metrics))
            if callbacks.any_pending():
                asked |= self._requested()
        self.run.control.status.set_phase("train")
        return asked

    def _evaluate_test(self) -> bool:
        """Evaluate the set `test` at the end of the run, unless that is done; return whether a stop interrupted it."""
        progress = self.progress
        if not self._evaluation.is_test_due(progress):
            return False
        weights: AbstractContextManager[int] = nullcontext(progress.step)
        if self.run.options.tests_best and self.checkpointer is not None:
            self._save(end=True)  # the best weights may be these; and other ones are about to take their place
            weights = self.checkpointer.best_weights(self.states, progress.step)
        with self._saved_on_error(test=True), self._clock.paused(), weights as tested:
            self._tell_tested(tested)
            restored = None if tested == progress.step else tested
            metrics = self._evaluation.evaluate(progress.step, test=True, restored=restored)
        if metrics is not None:
            others = progress.metrics if progress.evaluated_at == progress.step else {}
            progress.metrics, progress.evaluated_at, progress.tested = {**others, **metrics}, progress.step, tested
        return metrics is None

    def _tell_tested(self, step: int) -> None:
        """Say which weights the set `test` is evaluated with."""
        options = self.run.options
        is_best = options.tests_best and self.progress.best
        named = f", the best by trainer.keep_best={options.keep_best}" if is_best else ", the last ones"
        if self.run.world.is_rank_zero:
            logging.getLogger("ddpexp").info("testing the weights of step %s%s", step, named)
        self.logger.text("test/weights", f"the weights of step {step}{named}")

    @contextmanager
    def _saved_on_error(self, test: bool) -> Iterator[None]:
        try:
            yield
        except MetricError:
            self.progress.evaluated = test and self.progress.evaluated
            self._save(end=False)  # no step so far is lost, and a resume evaluates again
            raise

    def _save(self, end: bool, interrupted: bool = False) -> str | None:
        """Save a checkpoint; at the end return the hash of the weights. Ranks: all; communicates."""
        run = self.run
        if self.checkpointer is None:
            return None
        run.control.status.set_phase("save")
        fault_point("save")
        if self.callbacks.any_pending():
            self.callbacks.agree()
        with self._clock.paused(), self._times.apart(CHECKPOINT):
            self._step.check()
            self._check_finite()
            self._comparison.compare(self.progress.step)
            self._evaluation.refresh_average(estimate=not interrupted)  # else the time is limited
            epoch = run.epoch_after(self.progress.step)
            run.control.show_activity("saving")
            digest = self.checkpointer.save(self.states, self.progress, epoch, end)
            run.control.show_activity("saving", 1, 1)
        self._clock.saved()
        if self.callbacks.failed:
            self.checkpointer.finish()  # no step so far is lost
            run.world.barrier()
            self.callbacks.raise_error(f"Step {self.progress.step} is saved: correct the callback, or leave it out.")
        return digest

    def _finish(self, end: End | None) -> Outcome:
        """Record, evaluate, test and save what a run that is done has, or save where it was interrupted."""
        stopped = None if end is None else end.stopped
        interrupted = end is not None and stopped is None
        if not interrupted:  # else the time is limited
            self._profiler.end(self.progress.step, early=True)
        if stopped is not None:
            interrupted = self._complete_early_end()
        if not interrupted:
            interrupted = self._evaluate_test()
        if not interrupted:
            self.callbacks.end()
        digest = self._save(end=True, interrupted=interrupted)
        progress = self.progress
        return Outcome(
            step=progress.step,
            epoch=self.run.epoch_after(progress.step),
            metrics=progress.metrics,
            train_seconds=self._clock.total(),
            elapsed_seconds=self._clock.elapsed(),
            first_step_at=math.nan if self._first_step_at is None else self._first_step_at,
            interrupted=interrupted,
            digest=digest,
            tested=progress.tested,
            stopped=None if interrupted else stopped,
        )

    def _complete_early_end(self) -> bool:
        """Record and evaluate as after the last step, unless that is done; return whether a stop interrupted it."""
        progress = self.progress
        if len(self._metrics):
            self._rates.set(progress.step - 1)
            self._record()
        is_done = progress.evaluated_at == progress.step
        if not self._evaluation.periodic or self.run.options.eval_every == 0 or is_done:
            return False
        return self._evaluate().end == INTERRUPTED.end

    def _check_finite(self) -> None:
        """Refuse to checkpoint a diverged run. Ranks: all; communicates.

        Raises:
            NonFiniteError: with `trainer.nonfinite=stop`, a loss since the last record, or the gradient, is not finite.
        """
        if self.run.options.nonfinite == "stop":
            self._metrics.check_finite(self.progress.step - len(self._metrics) + 1)
            self._check_norms()

    def _check_norms(self) -> dict[str, float]:
        """Return the gradient norms of the last step as they are recorded."""
        norms = {f"train/grad_norm{suffix}": float(norm) for suffix, norm in self._step.norms.items()}
        bad = next((name for name, norm in norms.items() if not math.isfinite(norm)), None)
        if bad is not None and self.run.options.nonfinite == "stop" and not self.run.precision.skips:
            raise nonfinite_error(bad, norms[bad], self.progress.step)
        return norms
