"""Estimates for local SGD and DiLoCo. Pure, and free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ddpexp.launch import Layout
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.estimator import Estimator, Facts, MemoryItem, Traffic, Variant
from ddpexp.strategy.local.options import LocalOptions


@dataclass(frozen=True)
class LocalEstimator(Estimator):
    """Replicas that average their weights at the end of a round."""

    variants: ClassVar[Sequence[Variant]] = ()  # another number of messages, not another place for the model

    options: LocalOptions

    def traffic(self, facts: Facts, trainer: Trainer, layout: Layout) -> Traffic:
        """Return what the ranks send one another, spread over the steps of a round."""
        if layout.world_size == 1:
            return Traffic("none")
        return Traffic("backend", [-(-facts.trained_bytes // self.options.sync_every)])


class DiLoCoEstimator(LocalEstimator):
    """The same with an outer optimizer."""

    def memory(self, facts: Facts, trainer: Trainer, layout: Layout) -> list[MemoryItem]:
        """Return what a rank holds, with the weights of the last round and the outer momentum."""
        return [
            *super().memory(facts, trainer, layout),
            MemoryItem("outer optimizer", 2 * facts.trained_bytes, "the weights of the last round, and the momentum"),
        ]
