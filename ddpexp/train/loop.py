"""The run loop: steps, their records, evaluations. No rank and no launcher is asked here."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import add
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddpexp.config.schema import Trainer
from ddpexp.data.batches import EvalBatches, TrainBatches
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.launch.workers.control import Control
from ddpexp.loggers.base import Tracker
from ddpexp.strategy.base import Strategy
from ddpexp.system.fault_injection import fault_point
from ddpexp.task import HasOnEval, HasTrainStep, Schedule, Sums, Task
from ddpexp.train.ema import EMA
from ddpexp.train.optimizers import optimizer_state, parameter_names, rates_by_name, restore_optimizer, settings
from ddpexp.train.precision import Precision
from ddpexp.train.task_checks import check_loss, check_sums, mean_for_a_sum, named
from ddpexp.train.update import Update


@dataclass(frozen=True)
class Outcome:
    """Where a run ended."""

    step: int
    epoch: float
    metrics: Mapping[str, float]  # of the last evaluation
    train_seconds: float  # without evaluations, over all starts
    first_step_at: float  # seconds since the epoch of time, when this start's first step was done
    interrupted: bool = False  # asked to stop before the last step
    digest: str | None = None  # weights_sha256, where the end is saved. Ranks: rank zero


@dataclass
class TrainState:
    """How far a run is, as its checkpoint says."""

    step: int = 0
    evaluated: bool = True  # the evaluation after this step, if there is one, is done
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    evaluated_at: int | None = None  # the step of that
    best: float | None = None  # value of the metric of trainer.keep_best
    window: list[dict[str, Any]] = field(default_factory=list)  # sums of the steps since the last record
    train_seconds: float = 0.0


class Checkpointer(Protocol):
    """What keeps checkpoints."""

    def save(
        self, position: TrainState, optimizers: Mapping[str, Any], precision: Mapping[str, Any], epoch: float, end: bool
    ) -> str | None:
        """Save the run, with the state of its optimizers and of its gradient scale.

        At the `end` return the hash of the weights.

        Ranks: all. Training may go on when this returns.
        """
        ...

    def check(self) -> None:
        """Raise what went wrong behind, if anything did. Ranks: any."""
        ...


class NonFiniteError(DdpexpError):
    """A loss became infinite or not a number."""


@dataclass
class Loop:
    """Everything a run is made of; `fit` is the run."""

    task: Task
    strategy: Strategy
    optimizers: Mapping[str, Optimizer]
    schedule: Schedule
    precision: Precision
    world: World
    train: TrainBatches
    evals: Mapping[str, EvalBatches]
    tracker: Tracker
    control: Control
    options: Trainer
    num_steps: int
    checkpointer: Checkpointer | None = None
    average: EMA | None = None
    position: TrainState = field(default_factory=TrainState)
    _peaks: list[float] = field(init=False)
    _rates: Mapping[str, float] = field(init=False)
    _built: dict[str, list[dict[str, Any]]] = field(init=False)
    _names: Mapping[str, Tensor] = field(init=False)
    _update: Update = field(init=False)
    _by_hand: HasTrainStep | None = field(init=False)
    _checked: bool = field(init=False, default=False)  # that the task returns what it should

    def __post_init__(self) -> None:
        """Remember each parameter group's peak learning rate: schedules multiply it."""
        self._names = parameter_names(self.strategy.modules)
        self._built = {name: settings(one) for name, one in self.optimizers.items()}
        self._peaks = [group["lr"] for one in self.optimizers.values() for group in one.param_groups]
        self._rates = rates_by_name(self.optimizers)
        self._by_hand = self.task if isinstance(self.task, HasTrainStep) else None  # asked once: the question is slow
        self._update = Update(
            self.strategy, self.precision, self.optimizers, self.world, self.control, self.train.plan,
            self.options.seed,
            self.options.reduction, self.options.clip_grad_norm, self._by_hand is not None,
            None if self._by_hand is None else partial(check_loss, step=self._by_hand.train_step),
        )  # fmt: skip

    def fit(self) -> Outcome:
        """Train from where the run is to the last step, record, evaluate and save on the way.

        Ranks: all, in step with one another.

        Raises:
            NonFiniteError: with `trainer.nonfinite=stop`, a loss that is not finite; on all ranks alike.
        """
        waiting = sum(one["seconds"] for one in self.position.window)
        window, clock = self._window(), _Clock(self.position.train_seconds, waiting)
        done, first_step_at = self.position.step, math.nan
        interrupted = not self.position.evaluated and not self._evaluate_and_show(done, clock)
        self.strategy.train(True)
        self.control.set_phase("data")
        for step, micro_batches in enumerate(() if interrupted else self.train.steps(done, self.num_steps), start=done):
            self.control.set_phase("train")
            done = step + 1
            logs = done % self.options.log_every == 0 or done == self.num_steps
            factor = self._set_learning_rate(step)
            saves = self._saves_after(done)
            self._update.want_norm = logs or saves  # what is recorded or kept is looked at
            window.add(self._train_step(step, micro_batches))
            if self.average is not None and self._update.moved:
                self.average.update()
            self.control.step = done
            fault_point("step")
            if math.isnan(first_step_at):
                first_step_at = time.time()
                if done == 1 and self._by_hand is None:
                    with clock.paused():
                        self._warn_of_a_mean(micro_batches[0])
            if logs:
                self._record(done, factor, window, clock)
            better = False
            if self._evaluates_after(done):
                before = self.position.best
                interrupted = not self._evaluate_and_show(done, clock)
                better = self.position.best != before
            if done == self.num_steps or interrupted:
                break
            asked = self.control.poll(done, save=self._overdue(clock))
            interrupted = asked == "stop"
            if interrupted:
                break
            if saves or better or asked == "save":
                self._save(done, window, clock, end=False)
            self.control.set_phase("data")
            fault_point("data")
        digest = self._save(done, window, clock, end=True)
        epoch = done / self.train.steps_per_epoch
        return Outcome(done, epoch, self.position.metrics, clock.total(), first_step_at, interrupted, digest)

    def restore(self, optimizers: Mapping[str, Any], precision: Mapping[str, Any]) -> None:
        """Restore the optimizers and the gradient scale from what `Checkpointer.save` was given of them.

        Raises:
            RefusedError: the state of other optimizers.
        """
        if optimizers.keys() != self.optimizers.keys():
            raise RefusedError(
                f"the checkpoint holds the optimizers {', '.join(optimizers)}, and the run has "
                f"{', '.join(self.optimizers)}."
            )
        for name, optimizer in self.optimizers.items():
            restore_optimizer(optimizer, optimizers[name], self._names, name)
        self.precision.restore(precision)

    def _save(self, done: int, window: MetricAccumulator, clock: _Clock, end: bool) -> str | None:
        if self.checkpointer is None:
            return None
        self.control.set_phase("save")
        fault_point("save")
        with clock.paused():
            self._check_kept(done, window)
            self.position.step, self.position.window = done, window.pending(clock.since_record())
            self.position.train_seconds = clock.total()
            optimizers = {
                name: {**optimizer_state(one, self._names), "built": self._built[name]}
                for name, one in self.optimizers.items()
            }
            epoch = done / self.train.steps_per_epoch
            digest = self.checkpointer.save(self.position, optimizers, self.precision.state(), epoch, end)
        clock.saved()
        return digest

    def _check_kept(self, done: int, window: MetricAccumulator) -> None:
        """See that a checkpoint is worth going on from. Ranks: all; communicates.

        Raises:
            NonFiniteError: with `trainer.nonfinite=stop`, a loss since the last record, or the gradient, is not finite.
        """
        if self.options.nonfinite != "stop":
            return
        window.check_finite(first_step=done - len(window) + 1)
        self._check_norm(done)

    def _check_norm(self, done: int) -> None:
        if self.options.nonfinite == "stop" and self._update.norm is not None and not self.precision.skips:
            norm = float(self._update.norm)
            if not math.isfinite(norm):
                raise _not_finite("train/grad_norm", norm, done)

    def _saves_after(self, done: int) -> bool:
        if self.checkpointer is None:
            return False
        self.checkpointer.check()
        every = self.options.checkpoint_every
        if every == 0:
            return False
        return done % (self.train.steps_per_epoch if every == "epoch" else every) == 0

    def _overdue(self, clock: _Clock) -> bool:
        """Tell whether the time for a checkpoint has come. Ranks: rank zero's word counts, for clocks differ."""
        every = self.options.checkpoint_every_seconds
        return every is not None and self.checkpointer is not None and clock.since_save() > every

    def _window(self) -> MetricAccumulator:
        """Make the window of training sums.

        A place for each micro-batch of the global batch, or by hand for each rank.
        """
        each, size = self.train.plan.gradient_accumulation_steps, self.world.world_size
        if self._by_hand is not None:
            window = MetricAccumulator(self.world, [self.world.rank], size, self._by_hand.train_step)
        else:
            first = self.world.rank * each
            window = MetricAccumulator(self.world, range(first, first + each), each * size, self.task.step)
        window.restore(self.position.window)
        return window

    def _train_step(self, step: int, micro_batches: list[Any]) -> list[Sums]:
        update, seen = self._update, []
        update.begin(step)
        if self._by_hand is not None:
            seen.append(self._by_hand.train_step(update, micro_batches))
            if not self._checked:
                check_sums(seen[0], self._by_hand.train_step, trains=False)
        else:
            for number, batch in enumerate(micro_batches):
                with update.micro_batch(last=number == len(micro_batches) - 1):
                    sums = self.task.step(update.models, batch)
                    if not self._checked:
                        check_sums(sums, self.task.step, trains=True)
                        self._checked = True
                    update.backward(sums[0], sums[1])
                seen.append(sums)
            update.apply()
        update.end()
        self._checked = True
        return seen

    def _warn_of_a_mean(self, batch: Any) -> None:
        """Warn of a task that seems to return a mean for a sum, once in the life of a run. Ranks: all."""
        found = mean_for_a_sum(
            self.task, self.strategy.eval_model, self.strategy.modules, batch, self.precision, self.world.device
        )
        if found is not None and self.world.is_rank_zero:
            logging.getLogger("ddpexp").warning(found)

    def _set_learning_rate(self, step: int) -> float:
        """Give every parameter group its rate of this step; return what the schedule multiplies each one's own by."""
        factor = float(self.schedule.factor(step, self.num_steps))
        groups = (group for optimizer in self.optimizers.values() for group in optimizer.param_groups)
        for group, peak in zip(groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        return factor

    def _record(self, done: int, factor: float, window: MetricAccumulator, clock: _Clock) -> None:
        num_samples = len(window) * self.train.plan.global_batch_size
        values = window.reduce(first_step=done - len(window) + 1, stop=self.options.nonfinite == "stop")
        values = {f"train/{name}": value for name, value in values.items()}
        values |= {f"train/lr{name}": peak * factor for name, peak in self._rates.items()}
        if self._update.norm is not None:
            values["train/grad_norm"] = float(self._update.norm)
            self._check_norm(done)
        values["train/samples_per_second"] = num_samples / clock.lap()
        fault_point("record")
        self.tracker.scalars(done, done / self.train.steps_per_epoch, values)

    def _evaluates_after(self, done: int) -> bool:
        every = self.options.eval_every
        if every == 0 or not self.evals:
            return False
        period = self.train.steps_per_epoch if every == "epoch" else every
        return done % period == 0 or done == self.num_steps

    def _evaluate_and_show(self, done: int, clock: _Clock) -> bool:
        """Evaluate and record; return False when a stop request ended that before it was done, on all ranks alike."""
        self.control.set_phase("evaluate")
        weights = nullcontext() if self.average is None else self.average.in_place_of_weights()
        with clock.paused(), self.strategy.evaluation() as model, weights:
            metrics = evaluate(self.task, model, self.evals, self.precision, self.world, self.control)
            self.position.evaluated = metrics is not None
            if metrics is None:
                return False
            self.tracker.scalars(done, done / self.train.steps_per_epoch, metrics)
            bad = [
                (name, value) for name, value in metrics.items() if name.endswith("/loss") and not math.isfinite(value)
            ]
            if bad and self.options.nonfinite == "stop":
                raise _not_finite(*bad[0], done)
            if self.world.is_rank_zero and isinstance(self.task, HasOnEval):
                with torch.no_grad():
                    self.task.on_eval(model, next(iter(self.evals.values())).first(), self.tracker, done)
        self.position.metrics, self.position.evaluated_at = metrics, done
        self._keep_best(metrics)
        self.control.set_phase("train")
        return True

    def _keep_best(self, metrics: Mapping[str, float]) -> None:
        if self.options.keep_best is None:
            return
        mode, _, name = self.options.keep_best.partition(":")
        if name not in metrics:
            raise DdpexpError(
                f"trainer.keep_best={self.options.keep_best} names no metric of the evaluation: there are "
                f"{', '.join(metrics)}."
            )
        value, best = metrics[name], self.position.best
        if not math.isnan(value) and (best is None or (value > best if mode == "max" else value < best)):
            self.position.best = value


def evaluate(
    task: Task,
    model: Any,
    evals: Mapping[str, EvalBatches],
    precision: Precision,
    world: World,
    control: Control,
) -> dict[str, float] | None:
    """Return the metrics of every evaluation set, each sample counted once; `model` is in evaluation mode.

    None when a rank was asked to stop, on all ranks alike.
    Ranks: all; communicates once for each set.
    """
    metrics: dict[str, float] = {}
    with torch.no_grad(), precision.autocast():
        for name, batches in evals.items():
            found = _evaluate(task, model, batches, world, control)
            if found is None:
                return None
            metrics |= {f"{name}/{key}": value for key, value in found.items()}
    return metrics


def _evaluate(
    task: Task, model: Any, batches: EvalBatches, world: World, control: Control
) -> Mapping[str, float] | None:
    seen: list[Sums] = []
    stopped = False
    for batch in batches:
        control.heartbeat()
        fault_point("evaluate")
        stopped = control.asked_to_stop
        if stopped:
            break
        sums = task.step(model, batch)
        if not seen:
            check_sums(sums, task.step, trains=False)
        seen.append(_detached(sums))
    if not seen:  # fewer batches than ranks: learn the names, count nothing
        sums = task.step(model, batches.first())
        check_sums(sums, task.step, trains=False)
        loss, count, rest = sums
        seen = [(loss * 0, count * 0, {name: (total * 0, n * 0) for name, (total, n) in rest.items()})]
    places = range(world.rank, world.rank + len(seen) * world.world_size, world.world_size)
    window = MetricAccumulator(world, places, max(batches.num_batches, world.world_size), task.step)
    window.add(seen)
    return window.totals(stopped)


class MetricAccumulator:
    """Sums since the last record; a GPU's are left there, and one wait brings all of them to the host.

    Every micro-batch has a place of its own in the reduction, where the other ranks hold zeros: so the sums over
    micro-batches have one order, whichever ranks computed them, and are the same to the bit at every number of workers.
    """

    def __init__(
        self, world: World, places: Sequence[int], num_places: int, source: Callable[..., Any] | None = None
    ) -> None:
        """`places` are those of this rank's sums in a step, of `num_places` over all ranks.

        `source` is what returns them.
        """
        self._world = world
        self._keep = _read if _is_host(world.device) else _detached
        self._places = places
        self._num_places = num_places
        self._steps: list[Sequence[Sums]] = []
        self._source = source
        self._names: list[str] | None = None  # of the metrics, sorted; None before the first sums
        self._before: list[str] = []  # names of the rows that an earlier start has left
        self._rows: list[list[float]] = []  # reduced ones: of a step the loss, its count, and the same of each metric

    def __len__(self) -> int:
        return len(self._rows) + len(self._steps)

    def add(self, sums: Sequence[Sums]) -> None:
        """Keep a step's sums, one for each micro-batch, without the graphs that made them."""
        self._steps.append([self._keep(one) for one in sums])

    def totals(self, stopped: bool = False) -> dict[str, float] | None:
        """Return the means over everything added, or None if one rank was `stopped`. Ranks: all; communicates."""
        if self._reduce(stopped):
            return None
        return self._means(range(len(self._rows)))

    def pending(self, seconds: float) -> list[dict[str, Any]]:
        """Return, as plain values, what waits since `seconds` for the next record, and keep it. Ranks: all.

        Communicates.
        """
        self._reduce()
        return [{"names": self._known_names(), "rows": self._rows.copy(), "seconds": seconds}] if self._rows else []

    def restore(self, pending: Sequence[Mapping[str, Any]]) -> None:
        """Take up what `pending` has returned."""
        for one in pending:
            self._before, self._rows = list(one["names"]), [list(row) for row in one["rows"]]

    def reduce(self, first_step: int, stop: bool) -> dict[str, float]:
        """Return the means since the last call, and forget. Ranks: all; communicates.

        A loss that is not finite stays out of the mean and is counted instead.

        Raises:
            NonFiniteError: with `stop`, a loss that is not finite; names the first such step.
        """
        self._reduce()
        bad = self._bad()
        if stop and bad:
            raise self._not_finite(bad[0], first_step)
        means = self._means([row for row in range(len(self._rows)) if row not in bad])
        self._rows = []
        return {**means, **({"skipped_steps": float(len(bad))} if bad else {})}

    def check_finite(self, first_step: int) -> None:
        """Look at the losses since the last record. Ranks: all; communicates.

        Raises:
            NonFiniteError: one is not finite; names the first such step.
        """
        self._reduce()
        for row in self._bad():
            raise self._not_finite(row, first_step)

    def _not_finite(self, row: int, first_step: int) -> NonFiniteError:
        return _not_finite("train/loss", self._rows[row][0], first_step + row)

    def _bad(self) -> list[int]:
        return [number for number, row in enumerate(self._rows) if not math.isfinite(row[0])]

    def _means(self, rows: Sequence[int]) -> dict[str, float]:
        names = ["loss", *self._known_names()]
        totals = [sum(column) for column in zip(*(self._rows[row] for row in rows), strict=True)] or [0.0] * (
            2 * len(names)
        )
        return {
            name: _share(*pair) for name, pair in zip(names, zip(totals[::2], totals[1::2], strict=True), strict=True)
        }

    def _reduce(self, stopped: bool = False) -> bool:
        """Bring the sums of the added steps together; tell whether one rank was `stopped`. Ranks: all; communicates."""
        steps, self._steps = self._steps, []
        if not steps:
            return stopped
        device, flat = self._world.device, [sums for step in steps for sums in step]
        names = self._agreed_names(flat)
        columns = [_stack([loss for loss, _, _ in flat], device), _stack([count for _, count, _ in flat], device)]
        columns += [_stack([rest[name][part] for _, _, rest in flat], device) for name in names for part in (0, 1)]
        own: list[list[float]] = torch.stack(columns, dim=1).tolist()
        each = len(own) // len(steps)
        table: Sequence[Sequence[Sequence[float]]] = [own[first : first + each] for first in range(0, len(own), each)]
        if self._world.world_size > 1:
            table, stopped = self._over_ranks(table, stopped)
        if stopped:
            return True
        self._rows += [_total(places) for places in table]
        return False

    def _known_names(self) -> list[str]:
        return self._before if self._names is None else self._names

    def _agreed_names(self, sums: Sequence[Sums]) -> list[str]:
        """Return the names of the metrics, which are those of the first sums.

        Raises:
            DdpexpError: later ones have others.
        """
        if self._names is None:
            self._names = sorted(sums[0][2])
            places = {name: 2 * number for number, name in enumerate(self._before, start=1)}
            columns = [places.get(name) for name in self._names]  # the recipe may have changed since an earlier start
            self._rows = [
                row[:2]
                + [value for place in columns for value in ((0.0, 0.0) if place is None else row[place : place + 2])]
                for row in self._rows
            ]
        known = set(self._names)
        for _, _, rest in sums:
            if rest.keys() != known:
                now, then = (", ".join(names) or "none" for names in (sorted(rest), self._names))
                source = "the task" if self._source is None else named(self._source)
                raise DdpexpError(
                    f"{source} returned the metrics {now} after {then}, and those of several steps are added up by "
                    "name. Return "
                    f"the same names every time, with a count of 0 where there is nothing."
                )
        return self._names

    def _over_ranks(
        self, own: Sequence[Sequence[Sequence[float]]], stopped: bool
    ) -> tuple[list[list[list[float]]], bool]:
        """Return for each step the sums at all places, and whether one rank was `stopped`. Ranks: all; communicates."""
        packed = torch.zeros(len(own) * self._num_places * len(own[0][0]) + 1, dtype=torch.float64)
        table = packed[:-1].view(len(own), self._num_places, -1)
        places = self._places[: len(own[0])]
        table[:, places[0] : places[-1] + 1 : _stride(places)] = torch.tensor(own, dtype=torch.float64)
        packed[-1] = float(stopped)
        summed = self._world.sum(packed.to(self._world.device)).cpu()
        found: list[list[list[float]]] = summed[:-1].view_as(table).tolist()
        return found, bool(summed[-1])


class _Clock:
    """Seconds of training, evaluations and saving left out."""

    def __init__(self, seconds_before: float, since_record: float) -> None:
        """Earlier starts took `seconds_before`, of which `since_record` were after the last record."""
        self._start = self._saved = time.perf_counter()
        self._lap = self._start - since_record
        self._away = -seconds_before

    def lap(self) -> float:
        """Return the seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._lap = now - self._lap, now
        return seconds

    def since_record(self) -> float:
        return time.perf_counter() - self._lap

    def total(self) -> float:
        return time.perf_counter() - self._start - self._away

    def saved(self) -> None:
        self._saved = time.perf_counter()

    def since_save(self) -> float:
        return time.perf_counter() - self._saved

    @contextmanager
    def paused(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        away = time.perf_counter() - begin
        self._away += away
        self._lap += away


def _stride(places: Sequence[int]) -> int:
    return places[1] - places[0] if len(places) > 1 else 1


def _detached(sums: Sums) -> Sums:
    loss, count, rest = sums
    return loss.detach(), count, {name: (_unbound(total), n) for name, (total, n) in rest.items()}


def _unbound(value: float | Tensor) -> Any:
    """Take a number without the graph that made it."""
    return value.detach() if isinstance(value, Tensor) else value


def _is_host(device: torch.device) -> bool:
    """Tell whether a number is there as soon as it is asked for."""
    return device.type == "cpu"


def _read(sums: Sums) -> Sums:
    """Take the numbers themselves, where nobody has to wait for them: it is quicker than to detach and stack them."""
    loss, count, rest = sums
    return _number(loss), _number(count), {name: (_number(total), _number(n)) for name, (total, n) in rest.items()}


def _number(value: float | Tensor) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _share(total: float, count: float) -> float:
    """Divide; a metric that nothing was counted for is not a number."""
    return total / count if count else math.nan


def _total(places: Sequence[Sequence[float]]) -> list[float]:
    """Add up the sums of a step, one place after the other: not `sum`, which newer Pythons round otherwise."""
    if len(places) == 1:
        return list(places[0])
    return [reduce(add, column) for column in zip(*places, strict=True)]


def _stack(values: Sequence[int | Tensor], device: torch.device) -> Tensor:
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) == len(values) and len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1:
        return torch.stack(tensors).to(device, torch.float64)  # one conversion for all
    if tensors:
        return torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in values])
    return torch.tensor(values, dtype=torch.float64, device=device)


def _not_finite(name: str, value: float, step: int) -> NonFiniteError:
    return NonFiniteError(
        f"{name} is {value} at step {step}: the training has diverged or a sample is bad. "
        f"Lower optimizer.lr, set trainer.clip_grad_norm, or leave such steps out with trainer.nonfinite=skip."
    )
