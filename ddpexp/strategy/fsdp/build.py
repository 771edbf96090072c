"""Which of the strategies builds a sharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpexp.distributed.world import World
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.fsdp.exact import ExactFSDP
from ddpexp.strategy.fsdp.options import FSDPOptions
from ddpexp.strategy.fsdp.strategy import FSDP
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
    """Build the model and shard it."""
    common: dict[str, Any] = {"channels_last": trainer.channels_last, "prepare": prepare}
    lowers = trainer.param_dtype == "bf16" and trainer.master_weights
    if options.tp_size > 1 and world.world_size > 1:
        return TensorParallel(options, world, factory, gathers_bf16=lowers, **common)
    if trainer.reduction == "exact":
        return ExactFSDP(options, world, factory, gradient_accumulation_steps=gradient_accumulation_steps, **common)
    return FSDP(options, world, factory, gathers_bf16=lowers, **common)
