"""The contract between a recipe and the run loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ddpexp.track import Tracker
    from ddpexp.update import Update

Sums = tuple["Tensor", "int | Tensor", Mapping[str, "tuple[Tensor, int | Tensor]"]]


class Task(Protocol):
    """What is learned: one forward pass gives the loss and the metrics, in training and in evaluation."""

    def step(self, model: Any, batch: Any) -> Sums:
        """Return `(loss_sum, count, {name: (sum, count)})` over the batch.

        Sums, not means: the loop divides by the count over the global batch, so uneven slices, padding and
        accumulation come out right. A `count` that is a number must be the same for every micro-batch; one that depends
        on the data (tokens that are not padding) is a tensor, and costs one small reduction a step.

        Shapes: every tensor is a scalar. `model` is what the model section builds: a module, or a mapping of modules.
        """
        ...


@runtime_checkable
class HasOptimizers(Protocol):
    """A task that divides its parameters itself: parameter groups, or several optimizers."""

    def optimizers(self, model: Any, make: Any) -> Mapping[str, Optimizer]:
        """Return named optimizers; `make(parameters)` builds one as the optimizer section says."""
        ...


@runtime_checkable
class HasTrainStep(Protocol):
    """A task with several losses in one step (GANs and the like)."""

    def train_step(self, update: Update, batches: list[Any]) -> Sums:
        """Do one optimizer step by hand: `update.backward(loss)` and `update.apply(name)` keep precision and reduction right."""
        ...


@runtime_checkable
class HasOnEval(Protocol):
    """A task that shows something of an evaluation, such as images with predictions."""

    def on_eval(self, model: nn.Module, batch: Any, tracker: Tracker, step: int) -> None:
        """Look at the first batch of an evaluation. Ranks: rank zero; must not communicate."""
        ...
