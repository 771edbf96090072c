"""The contract between a recipe and the run loop."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ddpexp.loggers.base import Logger


@dataclass(frozen=True)
class MetricUpdate:
    """What a metric of torchmetrics is updated with in a batch; made by `metric_update`."""

    metric: Any  # a torchmetrics.Metric or MetricCollection
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]


def metric_update(metric: Any, /, *arguments: Any, **keywords: Any) -> MetricUpdate:
    """Return an entry of the metrics of an evaluation that stands for `metric.update(*arguments, **keywords)`.

    The metric itself is not changed: a copy of it gets the batches of all ranks, and what that computes at the end of
    the evaluation is recorded.

        metrics["auroc"] = ddpexp.metric_update(self.auroc, probabilities, labels)
    """
    return MetricUpdate(metric, arguments, keywords)


Pair = tuple["Tensor", "int | Tensor"]
Sums = tuple["Tensor", "int | Tensor", Mapping[str, "Pair"]]
EvalSums = tuple["Tensor", "int | Tensor", Mapping[str, "Pair | Tensor | MetricUpdate"]]
"""What a step may return in evaluation."""


class Task(Protocol):
    """What is trained: one forward pass returns the loss and the metrics, in training and in evaluation."""

    def step(self, model: Any, batch: Any) -> EvalSums:
        """Return `(loss_sum, count, {name: (sum, count)})` over the batch.

        Sums, not means: the loop divides by the count over the global batch, so that uneven slices, padding and
        gradient accumulation give correct means. A `count` that is a number must be the same for every micro-batch, and
        not 0. A count that depends on the data (tokens that are not padding) is a tensor, and costs one small reduction
        per step. If the tensors of a whole global batch count nothing, there is no gradient. The names of the metrics
        must be the same in every step.

        In evaluation (`not model.training`) the metrics may also hold what is no mean, for `finish` or torchmetrics:

        - a tensor of integers, of any shape: added up exactly, such as a confusion matrix;
        - `(sum, count)` with tensors of any shape: added up in the order of the batches;
        - `ddpexp.metric_update(metric, predictions, labels)`: a metric of torchmetrics, recorded as what it computes.

        Called under autocast if `trainer.precision` requires it.

        Shapes: but for these, every tensor is a scalar. `model` is what the model section builds: a module, or a
        mapping of modules.
        """
        ...


@runtime_checkable
class HasFinish(Protocol):
    """A task with metrics of an evaluation that are not means: perplexity, F1, what a confusion matrix shows."""

    def finish(self, sums: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `{name: number}`, to be recorded beside the means of an evaluation set.

        `sums` holds an entry for each name that `step` returned in evaluation, and `loss`, over the whole set and on
        the host: `(total, count)` for the loss and for every pair, an int64 tensor for integers, and for a metric of
        torchmetrics what it computes. Called after each evaluation of each set, not for the records of training.

            def finish(self, sums):
                total, count = sums["loss"]
                return {"perplexity": math.exp(total / count)}

        Ranks: rank zero; the others get what it returns. Must not communicate.
        """
        ...


@runtime_checkable
class HasOptimizers(Protocol):
    """A task that assigns its parameters to optimizers itself: parameter groups, or several optimizers."""

    def optimizers(self, model: Any, make: Any) -> Mapping[str, Optimizer]:
        """Return named optimizers; `make(parameters)` builds one from the optimizer section."""
        ...


class OptimizerStep(Protocol):
    """An optimizer step in progress: what a strategy, or a task's own `train_step`, works with."""

    @property
    def models(self) -> Any:
        """Return the module to train, or the mapping of modules, as passed to `Task.step`."""
        ...

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Return a context for forward and backward of one micro-batch. Ranks: all, equally often.

        Communicates where `last` is true.
        """
        ...

    def forward(self, batch: Any) -> Sums:
        """Return what `Task.step` returns for the batch; only inside `micro_batch`."""
        ...

    def backward(self, loss_sum: Tensor, count: int | Tensor) -> None:
        """Add the gradient of `loss_sum / (count over the global batch)`; only inside `micro_batch`."""
        ...

    def apply(self, *names: str) -> None:
        """Step these optimizers, or all, with the gradients of the preceding micro-batches."""
        ...


@runtime_checkable
class HasTrainStep(Protocol):
    """A task with several losses in one step (GANs and the like)."""

    def train_step(self, update: OptimizerStep, batches: list[Any]) -> Sums:
        """Do one optimizer step manually; return what `step` returns, summed over all micro-batches of this worker.

        - `update.models` is the module to train, or the mapping of modules, as passed to `step`.
        - `with update.micro_batch(last):` encloses forward and backward of each micro-batch; it sets the precision and
          seeds the random numbers. The workers sum their gradients where `last` is True: in the last micro-batch of a
          pass over `batches`.
        - `update.backward(loss_sum, count)`, inside that block, adds the gradient of `loss_sum / (count over the global
          batch)`. It may be called several times per micro-batch, each call with its own count; the calls are matched
          across micro-batches by their order. Counts are either numbers, with the same value in all micro-batches, or
          tensors. The total of a tensor is known only after all gradients are added up, so the totals of all calls must
          be equal, and every worker must make the same number of calls.
        - `update.apply(*names)`, after the micro-batches, steps these optimizers, or all. Several calls may use the
          same gradients, for different optimizers. All gradients are cleared when the next micro-batch begins or the
          step ends, so that gradients which one loss leaves in another network never reach that network's own step.

            def train_step(self, update, batches):
                for number, batch in enumerate(batches):
                    with update.micro_batch(last=number == len(batches) - 1):
                        loss_sum, count = self.loss(update.models["net"], batch)
                        update.backward(loss_sum, count)
                update.apply("net")
                return loss_sum.detach(), count, {}

        The returned loss is only recorded; it needs no gradient. Ranks: all, with the same number of micro-batches.
        """
        ...


@runtime_checkable
class HasOnEval(Protocol):
    """A task that logs something about an evaluation, such as images with predictions."""

    def on_eval(self, model: nn.Module, batch: Any, logger: Logger, step: int) -> None:
        """Log the first batch of an evaluation. Ranks: rank zero; must not communicate."""
        ...


@runtime_checkable
class Schedule(Protocol):
    """A learning-rate schedule: a pure function of the step, so that a resumed run needs no scheduler state."""

    def factor(self, step: int, num_steps: int) -> float:
        """Return the factor of `optimizer.lr` at step `step` of 0 .. num_steps - 1."""
        ...
