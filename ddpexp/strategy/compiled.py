"""Models compiled for training, whole or block by block. Evaluations use the same modules without compilation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from ddpexp.compat.compiler import leave_graphs_whole
from ddpexp.strategy.module_classes import check_classes, outermost


def compile_model(module: nn.Module, mode: str) -> nn.Module:
    """Return a compiled module that shares the parameters of `module`, which itself stays as it is.

    DDP is wrapped around it, and not the other way round: compilation happens in DDP's forward pass, where torch cuts
    the graph at the ends of buckets, so that they are reduced during backward. Around DDP, torch 2.13 leaves models
    uncompiled whose forward is its own, such as nn.Sequential. So does `module.compile()`.
    """
    return cast(nn.Module, torch.compile(module, mode=mode))


class CompiledForward:
    """The forward of a module: compiled in training, as written otherwise."""

    def __init__(self, plain: Callable[..., Any], mode: str) -> None:
        """Compile `plain` when it is first called."""
        self.enabled = True
        self._plain = plain
        self._compiled = torch.compile(plain, mode=mode)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Call the module's forward."""
        return (self._compiled if self.enabled else self._plain)(*inputs, **named)


def compile_blocks(models: Mapping[str, nn.Module], name: str, mode: str) -> list[CompiledForward]:
    """Compile the forward of each module whose class has this name, in place; return them.

    A block inside another one is compiled with it. torch compiles blocks with the same code only once. It does not cut
    their graphs at the ends of DDP's buckets: gradients of other blocks are reduced during a block's backward pass
    already, and the first bucket, of 1 MiB, would cut each block in two.

    Raises:
        RefusedError: there is no such module.
    """
    check_classes(models, [name], "trainer.compile_blocks={}")
    blocks = {id(block): block for model in models.values() for block in outermost(model, [name])}
    leave_graphs_whole()
    found = []
    for block in blocks.values():
        found.append(CompiledForward(block.forward, mode))
        block.forward = found[-1]
    return found
