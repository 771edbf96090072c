"""The experiment as a frozen, typed value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddpexp.config.instantiate import Trust
from ddpexp.launch.launchers.base import Launcher
from ddpexp.settings.experiment import ExperimentSettings
from ddpexp.settings.node import Node
from ddpexp.strategy.options import Options
from ddpexp.task import Schedule


@dataclass(frozen=True)
class Experiment(ExperimentSettings):
    """One experiment, as asked: parsed, checked, frozen."""

    scheduler: Schedule | Node  # a user's own is a node, which only workers build
    strategy: Options
    launcher: Launcher

    @property
    def trust(self) -> Trust:
        """Return whose code this experiment may name."""
        return Trust(self.run.trust, Path(self.run.code) if self.run.code else None)
