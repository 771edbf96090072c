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

from ddpexp.errors import RefusedError
from ddpexp.strategy.compiled import CompiledForward
from ddpexp.strategy.module_classes import check_classes, class_name, outermost


def checkpoint_activations(models: Mapping[str, nn.Module], classes: Sequence[str]) -> None:
    """Have each outermost module of these classes keep only its inputs for backward; in place.

    The gradients are the same to the bit: random numbers are drawn again, and buffers are changed once.

    Raises:
        RefusedError: there is no module of a class, or it is inside a compiled one.
    """
    check_classes(models, classes, "trainer.activation_checkpointing=[{}]")
    for model in models.values():
        compiled = [module for module in model.modules() if isinstance(module.forward, CompiledForward)]
        inside = {id(part): block for block in compiled for part in block.modules() if part is not block}
        for module in outermost(model, classes):
            if id(module) in inside:
                raise _inside_compiled(class_name(module), class_name(inside[id(module)]))
            module.forward = _CheckpointedForward(module, module.forward)


def _inside_compiled(name: str, block: str) -> RefusedError:
    return RefusedError(
        f"is computed again inside {block}, which trainer.compile_blocks={block} makes one graph: torch's compiler "
        "cannot restore there what a module changes",
        key="trainer.activation_checkpointing",
        value=f"[{name}]",
        suggestion=f"Use trainer.activation_checkpointing=[{block}], or trainer.compile_blocks={name}.",
    )


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
