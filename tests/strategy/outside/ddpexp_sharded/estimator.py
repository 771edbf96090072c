"""What FSDP2 takes, for `ddpexp plan`."""

from __future__ import annotations

from ddpexp.launch import Layout
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.estimator import Estimator, Facts, MemoryItem


class ShardedEstimator(Estimator):
    """A share of everything on each rank."""

    def memory(self, facts: Facts, trainer: Trainer, layout: Layout) -> list[MemoryItem]:
        """Return a rank's share of everything that is sharded."""
        parts = super().memory(facts, trainer, layout)
        return [MemoryItem(part.name, -(-(part.num_bytes or 0) // layout.world_size), "a share") for part in parts]
