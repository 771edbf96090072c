"""The recipe that `ddpexp check` tries: its task and models, in copies, with the same random numbers each time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ddpexp.distributed.rng import seed_everything
from ddpexp.errors import DdpexpError
from ddpexp.strategy.replica import Models, modules_of
from ddpexp.task import HasTrainStep, Sums, Task
from ddpexp.train.losses import are_named, combined, pairs_of, tensor_counts
from ddpexp.train.passes import passes
from ddpexp.train.precision import Precision
from ddpexp.train.task_step import CurrentProgress, function_of, functions_of, global_loss_of, step_of, with_progress

SEED = 1
"""Of every trial."""


@dataclass(frozen=True)
class Subject:
    """The object of the trials."""

    task: Task
    model: Any  # without a strategy around it: a module, or several by name
    modules: Models
    precision: Precision
    device: torch.device
    world: Any = None  # that a train_step sees
    current: CurrentProgress = field(default_factory=CurrentProgress)
    is_copy: bool = False

    @property
    def function(self) -> Callable[..., Any]:
        """Return the function of the task that trains."""
        return self.task.train_step if isinstance(self.task, HasTrainStep) else function_of(self.task)

    @property
    def is_manual(self) -> bool:
        """Return whether the task trains by itself, so that its `step` is only evaluated."""
        return isinstance(self.task, HasTrainStep)

    @property
    def has_step(self) -> bool:
        """Return whether the task can be evaluated."""
        return callable(getattr(self.task, "step", None)) or global_loss_of(self.task) is not None

    def copied(self, trains: bool, is_calm: bool = False) -> Subject:
        """Return a copy in training or evaluation mode; the subject itself where it cannot be copied.

        In one that `is_calm`, dropout and BatchNorm are as in evaluation: samples do not depend on one another.
        """
        is_copy = True
        try:
            task, model = deepcopy((self.task, self.model))
        except Exception:  # whatever an object of the user raises
            task = self.task
            model = self.model
            is_copy = False
        modules = modules_of(model)
        for module in modules.values():
            module.train(trains and not is_calm)
            module.training = trains  # which a step may ask for
        return replace(self, task=task, model=model, modules=modules, is_copy=is_copy)

    def step(self, batch: Any, host_seed: int = SEED, seed: int = SEED) -> Any:
        """Return the sums of a batch; `seed` seeds torch's random numbers, `host_seed` Python's and numpy's."""
        self._seed(host_seed, seed)
        with self.precision.autocast():
            return step_of(self.task, self.current)(self.model, batch)

    def embed(self, batch: Any, seed: int = SEED) -> Any:
        """Return what the task's `embed` returns for a batch."""
        return self._called(functions_of(self.task)[0], batch, seed)

    def loss(self, embeddings: Any) -> Any:
        """Return the sums of embeddings."""
        return self._called(function_of(self.task), embeddings, SEED)

    def _called(self, function: Callable[..., Any], argument: Any, seed: int) -> Any:
        seed_everything(seed)
        torch.manual_seed(seed)
        with self.precision.autocast():
            return with_progress(function, self.current)(self.model, argument)

    def train_step(self, batch: Any, host_seed: int = SEED, step: int = 0) -> TriedStep:
        """Have a task's own train_step do a step with a batch; gradients are computed, and no weights change."""
        assert isinstance(self.task, HasTrainStep)
        if not self.is_copy:  # a train_step may change what it trains
            raise DdpexpError("the task or the model cannot be copied")
        self._seed(host_seed)
        update: Any = TriedStep(self, step)
        self.task.train_step(update, [batch])
        tried: TriedStep = update
        return tried

    def _seed(self, host_seed: int, seed: int = SEED) -> None:
        seed_everything(host_seed)
        torch.manual_seed(seed)

    @property
    def tolerance(self) -> float:
        """Return the relative difference that rounding may make."""
        return 2e-2 if self.precision.lowers else 1e-3


class TriedStep:
    """An optimizer step that records losses and calls, and changes no weights; as `ddpexp.task.OptimizerStep`."""

    def __init__(self, subject: Subject, step: int) -> None:
        """Begin step number `step`, from 0, with the models of a copy."""
        self.models = subject.model
        self.world = subject.world
        self.subject = subject
        self.step, self.num_steps = step, max(step + 1, 2)
        self.losses: list[tuple[float, float]] = []  # each with its count
        self.calls: list[str] = []  # those that all workers must make alike

    def micro_batch(self, last: bool) -> TriedMicroBatch:
        """Return the next micro-batch."""
        return self.begin(last)

    def begin(self, last: bool, state: Tensor | None = None) -> TriedMicroBatch:
        """Return a micro-batch, which draws the random numbers of an earlier one if it gets its `state`."""
        if last:
            self.calls.append("update.micro_batch(last=True)")
        return TriedMicroBatch(self, self.subject.precision.autocast(), state)

    def backward(self, batches: Sequence[Any]) -> Sums:
        """Pass the batches through the task's `step`, forward and backward."""
        update: Any = self
        return passes(update, batches)

    def apply(self, *names: str) -> bool:
        """Leave the weights as they are."""
        self.calls.append(f"update.apply({', '.join(map(repr, names))})")
        return True


@dataclass
class TriedMicroBatch(AbstractContextManager["TriedMicroBatch"]):
    """A micro-batch of such a step; as `ddpexp.task.MicroBatch`."""

    step: TriedStep
    autocast: AbstractContextManager[object]
    state: Tensor | None  # of torch's random numbers, of an earlier pass

    def __enter__(self) -> TriedMicroBatch:
        """Begin forward and backward passes."""
        if self.state is None:
            self.state = torch.get_rng_state()
        else:
            torch.set_rng_state(self.state)
        self.autocast.__enter__()
        return self

    def repeat(self, last: bool) -> TriedMicroBatch:
        """Return a further pass, with the same random numbers."""
        return self.step.begin(last, self.state)

    def __exit__(self, *error: Any) -> bool | None:
        """End them."""
        return self.autocast.__exit__(*error)

    def forward(self, batch: Any) -> Sums:
        """Return the sums of the task's `step`; of several losses one, each over its count in the batch."""
        subject = self.step.subject
        sums = step_of(subject.task, subject.current)(self.step.models, batch)
        return (loss_of_batch(sums), 1, {**sums[1], **pairs_of(sums[0])}) if are_named(sums) else sums

    def backward(self, loss_sum: Tensor, count: int | Tensor, name: str = "loss") -> None:
        """Compute the gradient of a loss, and record both."""
        self.step.losses.append((float(loss_sum.detach()), float(count)))
        if isinstance(count, Tensor):
            self.step.calls.append("micro_batch.backward(..., a tensor)")
        loss_sum.backward()  # type: ignore[no-untyped-call]


def loss_of_batch(returned: Any) -> Any:
    """Return the loss of a batch; of several the sum, each over its count in the batch."""
    if not are_named(returned):
        return returned[0]
    losses = returned[0]
    counts = tensor_counts(losses)
    return combined(losses, {name: torch.where(count != 0, 1 / count, 0.0) for name, count in counts.items()})


def are_close(one: float, other: float, tolerance: float) -> bool:
    """Return whether two numbers are equal within rounding."""
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-6)
