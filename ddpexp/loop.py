"""The run loop: steps, their records, evaluations. No rank and no launcher is asked here."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddpexp.config import Trainer
from ddpexp.data.batches import EvalBatches, TrainBatches
from ddpexp.errors import DdpexpError
from ddpexp.launch.control import Control
from ddpexp.precision import Precision
from ddpexp.schedule import Schedule
from ddpexp.seeds import MODEL, seed_of, seed_torch
from ddpexp.strategy.ddp import DDP
from ddpexp.task import HasOnEval, HasTrainStep, Sums, Task
from ddpexp.track import Tracker
from ddpexp.world import World


@dataclass(frozen=True)
class Outcome:
    """Where a run ended."""

    step: int
    epoch: float
    metrics: Mapping[str, float]  # of the last evaluation
    train_seconds: float  # without evaluations
    first_step_at: float  # seconds since the epoch of time, when the first step was done


class NonFiniteError(DdpexpError):
    """A loss became infinite or not a number."""


@dataclass
class Update:
    """One optimizer step in the making: what a task's own `train_step` works with, and ours too."""

    strategy: DDP
    precision: Precision
    optimizers: Mapping[str, Optimizer]
    world: World
    num_micro_batches: int  # of the global batch
    global_batch_size: int
    clip_grad_norm: float | None
    want_norm: bool = False
    norm: Tensor | None = None
    _count: Tensor | None = None
    _weights: dict[int, Tensor] = field(default_factory=dict)

    @property
    def models(self) -> Any:
        """Return what the task's step calls: the wrapped module, or the mapping of them."""
        return self.strategy.training

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Enclose forward and backward of one micro-batch; the gradient is reduced in the last one."""
        with self.strategy.micro_batch(last):
            yield

    def forward(self, task: Task, batch: Any) -> Sums:
        """Call the task's step in this run's precision."""
        with self.precision.autocast():
            return task.step(self.models, batch)

    def backward(self, loss_sum: Tensor, count: int | Tensor) -> None:
        """Add the gradient of `loss_sum / (count over the global batch)`.

        Ranks: all. The reduction averages over ranks, so each rank's part is scaled up by their number.
        """
        if isinstance(count, Tensor):  # known for the global batch only once all of it was seen: see apply
            total = self.global_batch_size
            counted = count.detach().to(torch.float64, copy=True)
            self._count = counted if self._count is None else self._count + counted
        else:
            total = count * self.num_micro_batches
        if total not in self._weights:
            self._weights[total] = torch.tensor(self.world.world_size / total, device=self.world.device)
        self.precision.backward(loss_sum, self._weights[total])

    def apply(self, *names: str) -> None:
        """Step the named optimizers, or all, with the gradients there are, and clear every gradient.

        Those of other parameters too: what one network's loss leaves in another must not reach that one's next step.
        Ranks: all; communicates only where the task's counts are tensors.
        """
        optimizers = [self.optimizers[name] for name in names or self.optimizers]
        if self._count is not None:
            self.strategy.scale_gradient(self.global_batch_size / self.world.sum(self._count))
            self._count = None
        for optimizer in optimizers:
            self.precision.unscale(optimizer)
        if self.clip_grad_norm is not None:
            self.norm = self.strategy.clip(_parameters(optimizers), self.clip_grad_norm)
        elif self.want_norm:
            self.norm = self.strategy.gradient_norm(_parameters(optimizers))
        for optimizer in optimizers:
            self.precision.step(optimizer)
        self.precision.update()
        self.strategy.clear_gradient()


@dataclass
class Loop:
    """Everything a run is made of; `fit` is the run."""

    task: Task
    strategy: DDP
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
    _peaks: list[tuple[dict[str, Any], float]] = field(init=False)
    _update: Update = field(init=False)
    _by_hand: HasTrainStep | None = field(init=False)
    _count: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Remember each parameter group's peak learning rate: schedules multiply it."""
        self._peaks = [(group, group["lr"]) for optimizer in self.optimizers.values() for group in optimizer.param_groups]
        self._by_hand = self.task if isinstance(self.task, HasTrainStep) else None  # asked once: the question is slow
        cut = self.train.plan
        self._update = Update(
            self.strategy, self.precision, self.optimizers, self.world,
            num_micro_batches=cut.gradient_accumulation_steps * cut.world_size,
            global_batch_size=cut.global_batch_size,
            clip_grad_norm=self.options.clip_grad_norm,
        )  # fmt: skip

    def fit(self) -> Outcome:
        """Train from the first step to the last, record and evaluate on the way.

        Ranks: all, in step with one another.

        Raises:
            NonFiniteError: with `trainer.nonfinite=stop`, a loss that is not finite; on all ranks alike.
        """
        window = _Window(self.world)
        clock = _Clock()
        metrics: dict[str, float] = {}
        first_step_at = math.nan
        self.strategy.train(True)
        for step, micro_batches in enumerate(self.train.steps(0, self.num_steps)):
            done = step + 1
            logs = done % self.options.log_every == 0 or done == self.num_steps
            rate = self._set_learning_rate(step)
            self._update.want_norm = logs
            window.add(self._train_step(step, micro_batches))
            self.control.step = done
            if step == 0:
                first_step_at = time.time()
            if logs:
                self._record(done, rate, window, clock)
            if self._evaluates_after(done):
                with clock.paused():
                    metrics = self._evaluate_and_show(done)
        epoch = self.num_steps / self.train.steps_per_epoch
        return Outcome(self.num_steps, epoch, metrics, clock.total(), first_step_at)

    def _train_step(self, step: int, micro_batches: list[Any]) -> list[Sums]:
        if self._by_hand is not None:
            self._seed(step, 0)
            return [self._by_hand.train_step(self._update, micro_batches)]
        update, seen = self._update, []
        for number, batch in enumerate(micro_batches):
            self._seed(step, number)
            with self.strategy.micro_batch(last=number == len(micro_batches) - 1):
                loss_sum, count, sums = update.forward(self.task, batch)
                self._check_count(count)
                update.backward(loss_sum, count)
            seen.append((loss_sum, count, sums))
        update.apply()
        return seen

    def _check_count(self, count: int | Tensor) -> None:
        """Hold a task to its contract: a count that is a number is taken for that of every micro-batch on every rank."""
        if isinstance(count, Tensor) or count == self._count:
            return
        if self._count is not None:
            raise DdpexpError(
                f"the task's step returned the count {count} after {self._count}: a number must be the same for every "
                f"micro-batch. Return a tensor where it depends on the data."
            )
        self._count = count

    def _seed(self, step: int, number: int) -> None:
        """Make dropout a function of seed, step and micro-batch, not of what happened before."""
        index = self.train.rank * self.train.plan.gradient_accumulation_steps + number
        seed_torch(seed_of(self.options.seed, MODEL, step, index), self.world.device)

    def _set_learning_rate(self, step: int) -> float:
        factor = self.schedule.factor(step, self.num_steps)
        for group, peak in self._peaks:
            group["lr"] = peak * factor
        return float(self._peaks[0][1] * factor)

    def _record(self, done: int, rate: float, window: _Window, clock: _Clock) -> None:
        num_samples = len(window) * self.train.plan.global_batch_size
        values = window.reduce(first_step=done - len(window) + 1, stop=self.options.nonfinite == "stop")
        values = {f"train/{name}": value for name, value in values.items()}
        values["train/lr"] = rate
        if self._update.norm is not None:
            values["train/grad_norm"] = norm = float(self._update.norm)
            if self.options.nonfinite == "stop" and not (math.isfinite(norm) or self.precision.skips):
                raise _not_finite("train/grad_norm", norm, done)
        values["train/samples_per_second"] = num_samples / clock.lap()
        self.tracker.scalars(done, done / self.train.steps_per_epoch, values)

    def _evaluates_after(self, done: int) -> bool:
        every = self.options.eval_every
        if every == 0 or not self.evals:
            return False
        period = self.train.steps_per_epoch if every == "epoch" else every
        return done % period == 0 or done == self.num_steps

    def _evaluate_and_show(self, done: int) -> dict[str, float]:
        self.control.say("phase", phase="evaluate", step=done)
        with self.strategy.evaluation() as model:
            metrics = evaluate(self.task, model, self.evals, self.precision, self.world)
            self.tracker.scalars(done, done / self.train.steps_per_epoch, metrics)
            bad = [(name, value) for name, value in metrics.items() if name.endswith("/loss") and not math.isfinite(value)]
            if bad and self.options.nonfinite == "stop":
                raise _not_finite(*bad[0], done)
            if self.world.is_rank_zero and isinstance(self.task, HasOnEval):
                with torch.no_grad():
                    self.task.on_eval(model, next(iter(self.evals.values())).first(), self.tracker, done)
        self.control.say("phase", phase="train", step=done)
        return metrics


def evaluate(task: Task, model: Any, evals: Mapping[str, EvalBatches], precision: Precision, world: World) -> dict[str, float]:
    """Return the metrics of every evaluation set, each sample counted once; `model` is in evaluation mode.

    Ranks: all; communicates once for each set.
    """
    with torch.no_grad(), precision.autocast():
        return {f"{name}/{key}": value for name, batches in evals.items() for key, value in _evaluate(task, model, batches, world)}


def _evaluate(task: Task, model: Any, batches: EvalBatches, world: World) -> Iterable[tuple[str, float]]:
    window = _Window(world)
    for batch in batches:
        window.add([task.step(model, batch)])
    if not len(window):  # fewer batches than ranks: learn the names, count nothing
        loss, count, sums = task.step(model, batches.first())
        window.add([(loss * 0, count * 0, {name: (total * 0, n * 0) for name, (total, n) in sums.items()})])
    return window.totals().items()


class _Window:
    """Sums since the last record, left on the device; one reduction and one wait bring them to the host."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._steps: list[Sequence[Sums]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, sums: Sequence[Sums]) -> None:
        """Keep a step's sums, one for each micro-batch, without the graphs that made them."""
        self._steps.append([_detached(one) for one in sums])

    def totals(self) -> dict[str, float]:
        """Return the means over everything added. Ranks: all; communicates."""
        [loss], [count], means = self._reduce([0] * len(self._steps), 1)
        return {"loss": _share(loss, count), **means}

    def reduce(self, first_step: int, stop: bool) -> dict[str, float]:
        """Return the means since the last call, and forget. Ranks: all; communicates.

        A loss that is not finite stays out of the mean and is counted instead.

        Raises:
            NonFiniteError: with `stop`, a loss that is not finite; names the first such step.
        """
        losses, counts, means = self._reduce(range(len(self._steps)), len(self._steps))
        bad = [row for row, loss in enumerate(losses) if not math.isfinite(loss)]
        if bad and stop:
            raise _not_finite("train/loss", losses[bad[0]], first_step + bad[0])
        self._steps.clear()
        good = [row for row in range(len(losses)) if row not in bad]
        loss = _share(sum(losses[row] for row in good), sum(counts[row] for row in good))
        return {"loss": loss, **means, **({"skipped_steps": float(len(bad))} if bad else {})}

    def _reduce(self, rows: Sequence[int], num_rows: int) -> tuple[list[float], list[float], dict[str, float]]:
        """Pack losses and counts by row and all metrics into one vector, add it up over ranks, divide the metrics."""
        device = self._world.device
        flat = [sums for step in self._steps for sums in step]
        names = sorted(flat[0][2])
        where = torch.tensor([row for row, step in zip(rows, self._steps, strict=True) for _ in step], device=device)
        by_row = torch.zeros(2, num_rows, dtype=torch.float64, device=device)
        by_row[0].index_add_(0, where, _stack([loss for loss, _, _ in flat], device))
        by_row[1].index_add_(0, where, _stack([count for _, count, _ in flat], device))
        columns = [[rest[name][part] for _, _, rest in flat] for name in names for part in (0, 1)]
        totals = [_stack(column, device).sum() for column in columns]
        packed = self._world.sum(torch.cat([by_row.flatten(), *(total.reshape(1) for total in totals)])).tolist()
        losses, counts, pairs = packed[:num_rows], packed[num_rows : 2 * num_rows], packed[2 * num_rows :]
        return losses, counts, {name: _share(pairs[2 * index], pairs[2 * index + 1]) for index, name in enumerate(names)}


class _Clock:
    """Seconds of training, evaluations left out."""

    def __init__(self) -> None:
        self._start = self._lap = time.perf_counter()
        self._away = 0.0

    def lap(self) -> float:
        """Return the seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._lap = now - self._lap, now
        return seconds

    def total(self) -> float:
        return time.perf_counter() - self._start - self._away

    @contextmanager
    def paused(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        away = time.perf_counter() - begin
        self._away += away
        self._lap += away


def _detached(sums: Sums) -> Sums:
    loss, count, rest = sums
    return loss.detach(), count, {name: (total.detach(), n) for name, (total, n) in rest.items()}


def _share(total: float, count: float) -> float:
    """Divide; a metric that nothing was counted for is not a number."""
    return total / count if count else math.nan


def _stack(values: Sequence[int | Tensor], device: torch.device) -> Tensor:
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) == len(values) and len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1:
        return torch.stack(tensors).to(device, torch.float64)  # one conversion for all
    if tensors:
        return torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in values])
    return torch.tensor(values, dtype=torch.float64, device=device)


def _parameters(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]


def _not_finite(name: str, value: float, step: int) -> NonFiniteError:
    return NonFiniteError(
        f"{name} is {value} at step {step}: the training has diverged or a sample is bad. "
        f"Lower optimizer.lr, set trainer.clip_grad_norm, or leave such steps out with trainer.nonfinite=skip."
    )
