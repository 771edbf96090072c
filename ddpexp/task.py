"""The contract between a recipe and the run loop."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ddpexp.loggers.base import Tracker

Sums = tuple["Tensor", "int | Tensor", Mapping[str, "tuple[Tensor, int | Tensor]"]]


class Task(Protocol):
    """What is learned: one forward pass gives the loss and the metrics, in training and in evaluation."""

    def step(self, model: Any, batch: Any) -> Sums:
        """Return `(loss_sum, count, {name: (sum, count)})` over the batch.

        Sums, not means: the loop divides by the count over the global batch, so uneven slices, padding and accumulation
        come out right. A `count` that is a number must be the same for every micro-batch, and not 0; one that depends
        on the data (tokens that are not padding) is a tensor, and costs one small reduction a step. Where tensors count
        nothing in a whole global batch there is no gradient. The names of the metrics are the same in every step.

        Called inside of autocast where `trainer.precision` asks for it.

        Shapes: every tensor is a scalar. `model` is what the model section builds: a module, or a mapping of modules.
        """
        ...


@runtime_checkable
class HasOptimizers(Protocol):
    """A task that divides its parameters itself: parameter groups, or several optimizers."""

    def optimizers(self, model: Any, make: Any) -> Mapping[str, Optimizer]:
        """Return named optimizers; `make(parameters)` builds one as the optimizer section says."""
        ...


class OptimizerStep(Protocol):
    """One optimizer step in the making: what a task's own `train_step` works with."""

    @property
    def models(self) -> Any:
        """Return what is trained: the module, or the mapping of them, as `Task.step` gets it."""
        ...

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Enclose forward and backward of one micro-batch. Ranks: all, equally often.

        Communicates where `last` is true.
        """
        ...

    def backward(self, loss_sum: Tensor, count: int | Tensor) -> None:
        """Add the gradient of `loss_sum / (count over the global batch)`, inside of `micro_batch`."""
        ...

    def apply(self, *names: str) -> None:
        """Step these optimizers, or all, with the gradients of the micro-batches before."""
        ...


@runtime_checkable
class HasTrainStep(Protocol):
    """A task with several losses in one step (GANs and the like)."""

    def train_step(self, update: OptimizerStep, batches: list[Any]) -> Sums:
        """Do one optimizer step by hand, and return what `step` does, over all of this worker's micro-batches.

        - `update.models` is what is trained: the module, or the mapping of them, as `step` gets it.
        - `with update.micro_batch(last):` encloses forward and backward of each micro-batch, in the precision and with
          the random numbers of this run. The workers sum their gradients where `last` is True: in the last of a pass
          over `batches`.
        - `update.backward(loss_sum, count)`, inside of that, adds the gradient of `loss_sum / (count over the global
          batch)`. It may be called several times in a micro-batch, each time with a count of its own, the first, the
          second and so on in every micro-batch for the same. Counts are numbers, of one value in all micro-batches, or
          tensors. Tensors are known for the global batch only when all gradients are added up, so those of all calls
          must be the same in sum, and every worker makes as many calls.
        - `update.apply(*names)`, after the micro-batches, steps these optimizers, or all. Several calls may use the
          same gradients, for different optimizers. All gradients are cleared when the next micro-batch begins or the
          step ends, so what a loss leaves in other networks never reaches their own steps.

            def train_step(self, update, batches):
                for number, batch in enumerate(batches):
                    with update.micro_batch(last=number == len(batches) - 1):
                        loss_sum, count = self.loss(update.models["net"], batch)
                        update.backward(loss_sum, count)
                update.apply("net")
                return loss_sum.detach(), count, {}

        The loss that is returned is recorded; it needs no gradient. Ranks: all, with as many micro-batches.
        """
        ...


@runtime_checkable
class HasOnEval(Protocol):
    """A task that shows something of an evaluation, such as images with predictions."""

    def on_eval(self, model: nn.Module, batch: Any, tracker: Tracker, step: int) -> None:
        """Look at the first batch of an evaluation. Ranks: rank zero; must not communicate."""
        ...


@runtime_checkable
class Schedule(Protocol):
    """What multiplies `optimizer.lr`: a pure function of the step, so that a resumed run needs no state of it."""

    def factor(self, step: int, num_steps: int) -> float:
        """Return the multiplier for optimizer step `step` of 0 .. num_steps - 1."""
        ...
