"""Which of the strategies builds a sharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ddpexp.distributed.world import World
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.fsdp.exact import ExactFSDP
from ddpexp.strategy.fsdp.options import FSDPOptions
from ddpexp.strategy.fsdp.strategy import FSDP
from ddpexp.strategy.options import Compilation
from ddpexp.strategy.tensor.strategy import TensorParallel


def build(
    options: FSDPOptions,
    world: World,
    factory: Callable[[], Any],
    *,
    trainer: Trainer,
    gradient_accumulation_steps: int,
    prepare: Callable[[Any], None],
) -> FSDP:
    """Build the model and shard it.

    With trainer.channels_last images come in that memory format; parameters stay in their ordinary one, to be cut.
    """
    common: dict[str, Any] = {"compilation": Compilation.of(trainer), "prepare": prepare}
    lowers = trainer.param_dtype == "bf16" and trainer.master_weights
    if options.tp_size > 1 and world.world_size > 1:
        strategy: FSDP = TensorParallel(options, world, factory, gathers_bf16=lowers, **common)
    elif trainer.reduction == "exact":
        strategy = ExactFSDP(options, world, factory, gradient_accumulation_steps=gradient_accumulation_steps, **common)
    else:
        strategy = FSDP(options, world, factory, gathers_bf16=lowers, **common)
    if trainer.channels_last:
        for module in strategy.modules.values():
            module.register_forward_pre_hook(_channels_last)
    return strategy


def _channels_last(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        value.contiguous(memory_format=torch.channels_last) if isinstance(value, Tensor) and value.dim() == 4 else value
        for value in inputs
    )
