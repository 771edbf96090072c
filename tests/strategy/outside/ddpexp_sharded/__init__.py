"""A strategy of another package: parameters, gradients and optimizer state sharded by torch's FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ddpexp.launch import Layout
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.memory import Facts, Part
from ddpexp.strategy.options import Options

if TYPE_CHECKING:
    from ddpexp.distributed.world import World
    from ddpexp.strategy.base import Strategy


@dataclass(frozen=True)
class ShardedOptions(Options):
    """Options of the strategy; free of torch."""

    kind: Literal["sharded"]
    children: bool

    def import_modules(self) -> None:
        """Import FSDP2."""
        import torch.distributed.fsdp  # noqa: F401

    def memory(self, facts: Facts, trainer: Trainer, layout: Layout) -> list[Part]:
        """Return a rank's share of everything that is sharded."""
        parts = super().memory(facts, trainer, layout)
        return [Part(part.name, -(-(part.num_bytes or 0) // layout.world_size), "a share") for part in parts]

    def build(
        self,
        world: World,
        factory: Callable[[], Any],
        *,
        trainer: Trainer,
        gradient_accumulation_steps: int,
        prepare: Callable[[Any], None],
    ) -> Strategy:
        """Build the model and shard it."""
        from .strategy import Sharded

        return Sharded(self.children, world, factory, prepare)
