"""The run loop: steps, their records, evaluations. No rank and no launcher is asked here."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
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
            self._count = count.detach().double() if self._count is None else self._count + count.detach()
        else:
            total = count * self.num_micro_batches
        if total not in self._weights:
            self._weights[total] = torch.tensor(self.world.world_size / total, device=self.world.device)
        self.precision.backward(loss_sum, self._weights[total])

    def apply(self, *names: str) -> None:
        """Step the named optimizers, or all, with the gradients there are, and clear those.

        Ranks: all; communicates only where the task's counts are tensors.
        """
        optimizers = [self.optimizers[name] for name in names or self.optimizers]
        if self._count is not None:
            self.strategy.scale_gradient(self.global_batch_size / self.world.sum(self._count))
            self._count = None
        for optimizer in optimizers:
            self.precision.unscale(optimizer)
        if self.clip_grad_norm is not None:
            self.norm = self.strategy.clip(self.clip_grad_norm)
        elif self.want_norm:
            self.norm = self.strategy.gradient_norm()
        for optimizer in optimizers:
            self.precision.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        self.precision.update()


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

    def __post_init__(self) -> None:
        """Remember each parameter group's peak learning rate: schedules multiply it."""
        self._peaks = [(group, group["lr"]) for optimizer in self.optimizers.values() for group in optimizer.param_groups]
        self._by_hand = self.task if isinstance(self.task, HasTrainStep) else None  # asked once: the question is slow
        cut = self.train.batches
        self._update = Update(
            self.strategy, self.precision, self.optimizers, self.world,
            num_micro_batches=cut.accumulation * cut.world_size,
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
            if step == 0:
                first_step_at = time.time()
            if logs:
                self._record(done, rate, window, clock)
            if self._evaluates_after(done):
                with clock.paused():
                    metrics = self._evaluate_and_show(done)
        epoch = self.num_steps / self.train.steps_per_epoch
        return Outcome(self.num_steps, epoch, metrics, clock.total(), first_step_at)

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of every evaluation set, each sample counted once.

        Ranks: all; communicates once for each set.
        """
        self.strategy.share_buffers()
        self.strategy.train(False)
        try:
            with torch.inference_mode(), self.precision.autocast():
                return {
                    f"{name}/{key}": value
                    for name, batches in self.evals.items()
                    for key, value in self._evaluate_set(batches).items()
                }
        finally:
            self.strategy.train(True)

    def _train_step(self, step: int, micro_batches: list[Any]) -> list[Sums]:
        if self._by_hand is not None:
            self._seed(step, 0)
            return [self._by_hand.train_step(self._update, micro_batches)]
        update, seen = self._update, []
        for number, batch in enumerate(micro_batches):
            self._seed(step, number)
            with self.strategy.micro_batch(last=number == len(micro_batches) - 1):
                loss_sum, count, sums = update.forward(self.task, batch)
                update.backward(loss_sum, count)
            seen.append((loss_sum.detach(), count, sums))
        update.apply()
        return seen

    def _seed(self, step: int, number: int) -> None:
        """Make dropout and augmentation a function of seed, step and micro-batch, not of what happened before."""
        index = self.train.rank * self.train.batches.accumulation + number
        seed = _mix(_mix(_mix(self.options.seed) + step) + index)
        torch.default_generator.manual_seed(seed)
        if self.world.device.type == "cuda":
            torch.cuda.default_generators[self.world.local_rank].manual_seed(seed)

    def _set_learning_rate(self, step: int) -> float:
        factor = self.schedule.factor(step, self.num_steps)
        for group, peak in self._peaks:
            group["lr"] = peak * factor
        return float(self._peaks[0][1] * factor)

    def _record(self, done: int, rate: float, window: _Window, clock: _Clock) -> None:
        num_samples = len(window) * self.train.batches.global_batch_size
        values = window.reduce(first_step=done - len(window) + 1, stop=self.options.nonfinite == "stop")
        values = {f"train/{name}": value for name, value in values.items()}
        values["train/lr"] = rate
        if self._update.norm is not None:
            values["train/grad_norm"] = float(self._update.norm)
        values["train/samples_per_second"] = num_samples / clock.lap()
        self.tracker.scalars(done, done / self.train.steps_per_epoch, values)

    def _evaluates_after(self, done: int) -> bool:
        every = self.options.eval_every
        if every == 0 or not self.evals:
            return False
        period = self.train.steps_per_epoch if every == "epoch" else every
        return done % period == 0 or done == self.num_steps

    def _evaluate_and_show(self, done: int) -> dict[str, float]:
        self.control.tell("phase", phase="evaluate", step=done)
        metrics = self.evaluate()
        self.tracker.scalars(done, done / self.train.steps_per_epoch, metrics)
        if self.world.is_rank_zero and isinstance(self.task, HasOnEval):
            self.strategy.train(False)
            with torch.inference_mode():
                self.task.on_eval(self.strategy.evaluating, next(iter(self.evals.values())).first(), self.tracker, done)
            self.strategy.train(True)
        self.control.tell("phase", phase="train", step=done)
        return metrics

    def _evaluate_set(self, batches: EvalBatches) -> dict[str, float]:
        window = _Window(self.world)
        for batch in batches:
            window.add([self.task.step(self.strategy.evaluating, batch)])
        if not len(window):  # fewer batches than ranks: learn the names, count nothing
            loss, count, sums = self.task.step(self.strategy.evaluating, batches.first())
            window.add([(loss * 0, count * 0, {name: (total * 0, n * 0) for name, (total, n) in sums.items()})])
        return window.totals()


class _Window:
    """Sums since the last record, left on the device; one reduction and one wait bring them to the host."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._steps: list[Sequence[Sums]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, sums: Sequence[Sums]) -> None:
        self._steps.append(sums)

    def totals(self) -> dict[str, float]:
        """Return the means over everything added. Ranks: all; communicates."""
        _, means = self._reduce([0] * len(self._steps), 1)
        return means

    def reduce(self, first_step: int, stop: bool) -> dict[str, float]:
        """Return the means since the last call, and forget. Ranks: all; communicates.

        Raises:
            NonFiniteError: with `stop`, a loss that is not finite; names the first such step.
        """
        losses, means = self._reduce(list(range(len(self._steps))), len(self._steps))
        bad = [step for step, loss in enumerate(losses, start=first_step) if not math.isfinite(loss)]
        if bad and stop:
            raise NonFiniteError(
                f"train/loss is {losses[bad[0] - first_step]} at step {bad[0]}: the training has diverged or a sample is bad. "
                f"Lower optimizer.lr, set trainer.clip_grad_norm, or leave such steps out with trainer.nonfinite=skip."
            )
        if bad:
            good = [loss for loss in losses if math.isfinite(loss)]
            means["loss"] = means["loss"] if not good else sum(good) / len(good) * len(self._steps) / means.pop("_count")
            means["skipped_steps"] = float(len(bad))
        means.pop("_count", None)
        self._steps.clear()
        return means

    def _reduce(self, rows: list[int], num_rows: int) -> tuple[list[float], dict[str, float]]:
        """Pack the losses by row and all counts and metrics into one vector, add it up over ranks, divide."""
        flat = [(row, sums) for row, step in zip(rows, self._steps, strict=True) for sums in step]
        names = sorted(flat[0][1][2])
        columns = [[sums[2][name][part] for _, sums in flat] for name in names for part in (0, 1)]
        device = self._world.device
        losses = torch.zeros(num_rows, dtype=torch.float64, device=device)
        where = torch.tensor([row for row, _ in flat], device=device)
        losses.index_add_(0, where, _stack([sums[0] for _, sums in flat], device))
        rest = [_stack(column, device).sum() for column in ([sums[1] for _, sums in flat], *columns)]
        packed = self._world.sum(torch.cat([losses, torch.stack(rest)])).tolist()
        loss_rows, (count, *pairs) = packed[:num_rows], packed[num_rows:]
        means = {"loss": sum(loss_rows) / count}
        for index, name in enumerate(names):
            means[name] = pairs[2 * index] / pairs[2 * index + 1]
        return loss_rows, means


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


def _stack(values: Sequence[int | Tensor], device: torch.device) -> Tensor:
    if isinstance(values[0], Tensor):
        return torch.stack([value.detach() if isinstance(value, Tensor) else torch.tensor(value) for value in values]).double()
    return torch.tensor(values, dtype=torch.float64, device=device)


def _mix(value: int) -> int:
    """Spread a number over 64 bits. Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014."""
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)
