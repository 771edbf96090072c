"""What the run loop asks of a strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from ddpexp.strategy.comm.shared_memory import SharedMemory


class Strategy(Protocol):
    """How the replicas of a model work together.

    Owns wrapping, the borders of micro-batches, the reduction and its norm.
    """

    single: bool  # the model is one module, not a mapping of them
    modules: dict[str, nn.Module]  # the modules themselves, which no forward pass communicates through
    gradient_weight: float  # what a part of the loss is multiplied by, because of how gradients are summed
    memory: SharedMemory | None  # what gradients go through, where it is not the backend

    @property
    def train_model(self) -> Any:
        """Return what a task's training step calls: a module, or the mapping of them."""
        ...

    @property
    def eval_model(self) -> Any:
        """Return the bare module, or the mapping of them."""
        ...

    def train(self, mode: bool) -> None:
        """Switch every module between training and evaluation."""
        ...

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Enclose forward and backward of one micro-batch; gradients are reduced in the last one of a step."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter of every module."""
        ...

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the 2-norm of the reduced gradient, on the device. Ranks: the same on all, without communication."""
        ...

    def clip(self, parameters: Sequence[Tensor], limit: float) -> Tensor:
        """Scale the gradient down to `limit` and return its norm before that."""
        ...

    def clear_gradient(self) -> None:
        """Forget every gradient."""
        ...

    def scale_gradient(self, factor: Tensor) -> None:
        """Multiply the gradient in place."""
        ...

    def evaluation(self) -> AbstractContextManager[Any]:
        """Give the bare model in evaluation mode, with rank zero's buffers. Ranks: all; may communicate."""
        ...

    def synced_buffers(self) -> AbstractContextManager[None]:
        """Give every rank rank zero's buffers for a while. Ranks: all; may communicate."""
        ...

    def local_buffers(self) -> Mapping[str, Tensor]:
        """Return the buffers that stay different from rank to rank, by name."""
        ...
