"""Activations that are computed again in backward instead of kept: less memory, and a second forward pass.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddpexp.strategy.module_classes import check_classes


def checkpoint_activations(models: Mapping[str, nn.Module], classes: Sequence[str]) -> None:
    """Have each outermost module of these classes keep only its inputs for backward; in place.

    The gradients are the same to the bit: random numbers are drawn again, and buffers are changed once.

    Raises:
        RefusedError: there is no module of a class.
    """
    check_classes(models, classes, "trainer.activation_checkpointing=[{}]")
    for model in models.values():
        for module in outermost(model, classes):
            module.forward = _CheckpointedForward(module, module.forward)


class _CheckpointedForward:
    """The forward of a module, whose activations are computed again in backward."""

    def __init__(self, module: nn.Module, plain: Callable[..., Any]) -> None:
        self._module, self._plain = module, plain

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._plain(*inputs, **named)
        return checkpoint(self._plain, *inputs, use_reentrant=False, context_fn=self._contexts, **named)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _unchanged_buffers(self._module)


@contextmanager
def _unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Undo changes of the buffers inside the block: the first forward pass has made them."""
    saved = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in saved:
                buffer.copy_(values)


def outermost(module: nn.Module, classes: Sequence[str]) -> Iterator[nn.Module]:
    """Yield the modules of these classes that are in no other of them."""
    if type(module).__name__ in classes:
        yield module
        return
    for child in module.children():
        yield from outermost(child, classes)
