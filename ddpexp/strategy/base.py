"""The interface between the run loop and a strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpexp.distributed.world import Memory, World
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.mesh import DataRank
from ddpexp.task import OptimizerStep, Sums

_WHOLE_SHAPE = "_ddpexp_whole_shape"  # attribute of a parameter
_SHARD = "_ddpexp_shard"  # likewise


def set_whole_shape(parameter: nn.Parameter, shape: Sequence[int]) -> None:
    """Note the shape of a parameter of which other ranks hold a part, or all."""
    setattr(parameter, _WHOLE_SHAPE, tuple(shape))


def num_elements(parameter: Tensor) -> int:
    """Return the number of elements of a parameter, of which this rank may hold a part."""
    return math.prod(getattr(parameter, _WHOLE_SHAPE, parameter.shape))


@dataclass(frozen=True)
class Shard:
    """What this rank holds of a tensor: all of it, as every rank does, or a contiguous block of its rows.

    With tensor parallelism it may also be several blocks of rows, one after the other, and some of their columns.
    """

    tensor: Tensor  # an ordinary tensor, also where the model has a DTensor
    shape: tuple[int, ...]  # of the whole tensor
    first_row: int | None = None  # None: every rank holds the whole tensor
    replica: int = 0  # numbers the ranks that hold the same rows
    rows: tuple[range, ...] | None = None  # None: one block, from `first_row`
    columns: tuple[range, ...] | None = None  # None: whole rows

    @classmethod
    def whole(cls, tensor: Tensor) -> Shard:
        """Return a tensor that every rank holds."""
        return cls(tensor, tuple(tensor.shape))

    @property
    def blocks(self) -> tuple[range, ...]:
        """Return the rows of the whole tensor that this rank holds, in the order of its own."""
        if self.rows is not None:
            return self.rows
        first = self.first_row or 0
        return (range(first, first + len(self.tensor)),)

    @property
    def is_contiguous(self) -> bool:
        """Return whether this rank holds one block of whole rows, or the whole tensor."""
        return self.columns is None and (self.rows is None or len(self.rows) == 1)

    def read(self, read_rows: Callable[[int, int], Tensor]) -> Tensor:
        """Return this rank's part of the tensor of which `read_rows(first_row, num_rows)` returns whole rows."""
        blocks = [read_rows(rows.start, len(rows)) for rows in self.blocks]
        if self.columns is not None:
            blocks = [torch.cat([rows[:, part.start : part.stop] for part in self.columns], 1) for rows in blocks]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    @classmethod
    def of(cls, value: Tensor | Shard) -> Shard:
        """Return a shard as it is, and a tensor as one that every rank holds."""
        return value if isinstance(value, Shard) else cls.whole(value)


@contextmanager
def marked_shard(parameter: nn.Parameter, shard: Callable[[Tensor], Shard]) -> Iterator[None]:
    """Have `shard_of` return `shard(parameter)` inside the block."""
    setattr(parameter, _SHARD, shard)
    try:
        yield
    finally:
        delattr(parameter, _SHARD)


def shard_of(tensor: Tensor) -> Shard | None:
    """Return what this rank holds of a parameter where that is marked."""
    shard = getattr(tensor, _SHARD, None)
    return None if shard is None else shard(tensor.detach())


@runtime_checkable
class Stored(Protocol):
    """A tensor in a checkpoint, which is not read yet."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its shape."""
        ...

    def read(self, first_row: int = 0, num_rows: int | None = None) -> Tensor:
        """Read rows, by default all, into new memory of the CPU."""
        ...


class Strategy(Protocol):
    """How the ranks train a model together: who holds what, and how gradients are reduced.

    `ddpexp.strategy.replica.Replicas` is a base class for strategies in which every rank holds the whole model.
    """

    data: DataRank  # this rank's share of the global batch
    single: bool  # the model is one module, not a mapping of modules
    modules: dict[str, nn.Module]  # as built: neither wrapped nor compiled
    gradient_weight: float  # the loss is multiplied by it, to make up for how gradients are summed
    memory: Memory | None  # what carries sums of the run loop; None: the backend
    forward_communicates: bool  # a forward pass of `eval_model` outside `evaluation` does
    evaluates_together: bool  # a forward pass in `evaluation` communicates: all ranks do equally many
    returns_on_last_stage: bool  # the task's step ends on other ranks where the model is called, without sums
    waits_in_backward: bool  # torch's DDP may, at the end of the last backward pass of a round
    has_single_passes: bool  # set by the run loop: each micro-batch has one forward and one backward pass
    stage: int  # of a pipeline, that this rank computes: ranks of one stage do the same work

    @property
    def train_model(self) -> Any:
        """Return the (wrapped) module that a task trains, or the mapping of modules."""
        ...

    @property
    def eval_model(self) -> Any:
        """Return the unwrapped module, or the mapping of modules."""
        ...

    def train(self, mode: bool) -> None:
        """Set every module to training or evaluation mode."""
        ...

    def build_optimizers(self, build: Callable[[Any], Mapping[str, Optimizer]]) -> Mapping[str, Optimizer]:
        """Return the optimizers that `build(model)` makes for the model as this rank holds it."""
        ...

    def train_step(self, step: OptimizerStep, micro_batches: Sequence[Any]) -> list[Sums]:
        """Do one optimizer step; return what the task's `step` returned for each micro-batch.

        Ranks: all; communicates.
        """
        ...

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Return a context for forward and backward of one micro-batch; the last one of a step reduces gradients."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter of every module, as this rank holds it."""
        ...

    def gradient_values(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return what this rank holds of the existing gradients, as dense real tensors that share memory with them."""
        ...

    def on_any_rank(self, flag: Tensor) -> Tensor:
        """Return the largest value of a flag on the ranks, such as whether a gradient is not finite. Ranks: all.

        Communicates only if the ranks hold different gradients. Shapes: a scalar.
        """
        ...

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the 2-norm of the reduced gradient, on the device. Ranks: all, with the same result."""
        ...

    def clip(self, parameters: Sequence[Tensor], limit: float) -> Tensor:
        """Clip the gradient norm to `limit`; return the norm before clipping. Ranks: all, also with other results."""
        ...

    def norm_to_record(self, norm: Tensor) -> Tensor:
        """Return what is recorded for a norm that `clip` returned. Ranks: all, with the same result."""
        ...

    def clear_gradient(self) -> None:
        """Clear every gradient."""
        ...

    def scale_gradient(self, factor: Tensor) -> None:
        """Multiply the gradient in place."""
        ...

    def evaluation(self) -> AbstractContextManager[Any]:
        """Yield the model in evaluation mode, with rank zero's buffers. Ranks: all; may communicate.

        Inside, a forward pass must not communicate unless `evaluates_together` is true: otherwise ranks evaluate
        different numbers of batches, and `Task.on_eval` runs on rank zero alone.
        """
        ...

    def synced_buffers(self) -> AbstractContextManager[None]:
        """Give every rank the buffers of rank zero inside the block. Ranks: all; may communicate."""
        ...

    def local_buffers(self) -> Mapping[str, Tensor]:
        """Return the buffers that may differ between ranks, by name."""
        ...

    def shard(self, name: str, tensor: Tensor) -> Shard:
        """Return what this rank holds of a tensor of a model or of an optimizer, for a checkpoint.

        `tensor` is from a model's `state_dict`, or from an optimizer's state of a parameter. `name` is that of the
        parameter or buffer, such as `model.0.weight`.
        """
        ...

    def shard_to_save(self, name: str, tensor: Tensor) -> Shard:
        """Return what this rank writes of a tensor: as `shard` returns it, but whole rows.

        Ranks: all, in the same order; may communicate.
        """
        ...

    def from_local(self, name: str, local: Tensor) -> Tensor:
        """Return this rank's rows of an optimizer's state in the form in which the optimizer holds them.

        `local` has the rows that `shard` gives of the parameter `name`, of whose shape the state is.
        """
        ...


class Builder(Protocol):
    """The function that the options of a kind of strategy name, to build the model inside its strategy."""

    def __call__(
        self,
        options: Any,
        world: World,
        factory: Callable[[], Any],
        *,
        trainer: Trainer,
        gradient_accumulation_steps: int,
        prepare: Callable[[Any], None],
    ) -> Strategy:
        """Build the model inside its strategy.

        `factory` returns a module or a mapping of modules, seeded alike on every rank. `prepare` gets the modules by
        name before they are wrapped or sharded, for example to load weights into them.

        Ranks: all; may communicate.
        """
        ...
