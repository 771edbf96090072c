"""A strategy of another package: parameters, gradients and optimizer state sharded by torch's FSDP2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ddpexp.launch import Layout
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.memory import Facts, Part
from ddpexp.strategy.options import Options


@dataclass(frozen=True)
class ShardedOptions(Options):
    """Options of the strategy; free of torch."""

    builder: ClassVar[str] = "ddpexp_sharded.strategy:build"

    kind: Literal["sharded"]
    children: bool

    def memory(self, facts: Facts, trainer: Trainer, layout: Layout) -> list[Part]:
        """Return a rank's share of everything that is sharded."""
        parts = super().memory(facts, trainer, layout)
        return [Part(part.name, -(-(part.num_bytes or 0) // layout.world_size), "a share") for part in parts]
