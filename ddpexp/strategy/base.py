"""The interface between the run loop and a strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from ddpexp.strategy.comm.shared_memory import SharedMemory


class Strategy(Protocol):
    """How the replicas of a model work together: wrapping, micro-batches, gradient reduction and gradient norm."""

    single: bool  # the model is one module, not a mapping of modules
    modules: dict[str, nn.Module]  # unwrapped: their forward passes do not communicate
    gradient_weight: float  # the loss is multiplied by it, to make up for how gradients are summed
    memory: SharedMemory | None  # what carries the gradients; None: the backend

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

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Return a context for forward and backward of one micro-batch; the last one of a step reduces gradients."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter of every module."""
        ...

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the 2-norm of the reduced gradient, on the device. Ranks: the same on all, without communication."""
        ...

    def clip(self, parameters: Sequence[Tensor], limit: float) -> Tensor:
        """Clip the gradient norm to `limit`; return the norm before clipping."""
        ...

    def clear_gradient(self) -> None:
        """Clear every gradient."""
        ...

    def scale_gradient(self, factor: Tensor) -> None:
        """Multiply the gradient in place."""
        ...

    def evaluation(self) -> AbstractContextManager[Any]:
        """Yield `eval_model` in evaluation mode, with rank zero's buffers. Ranks: all; may communicate."""
        ...

    def synced_buffers(self) -> AbstractContextManager[None]:
        """Give every rank the buffers of rank zero inside the block. Ranks: all; may communicate."""
        ...

    def local_buffers(self) -> Mapping[str, Tensor]:
        """Return the buffers that may differ between ranks, by name."""
        ...
