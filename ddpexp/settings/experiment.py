"""The sections of an experiment that are plain values: what a part may look at to check itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ddpexp.settings.data import Data
from ddpexp.settings.node import Node
from ddpexp.settings.run import Predict, Recipe, RunSettings
from ddpexp.settings.trainer import Trainer


@dataclass(frozen=True)
class ExperimentSettings:
    """One experiment as asked, without its strategy, launcher and schedule, which are built where it is parsed."""

    recipe: Recipe
    task: Node
    model: Node
    data: Data
    optimizer: Node
    logger: Mapping[str, Node]  # what records the run beside metrics.jsonl, by the key below `logger`
    callbacks: Mapping[str, Node]  # in the order of their calls, by the key below `callbacks`
    trainer: Trainer
    run: RunSettings
    predict: Predict


@runtime_checkable
class Checked(Protocol):
    """A part, such as a strategy or a launcher, that states what it needs of the rest of the configuration."""

    def check(self, experiment: ExperimentSettings) -> None:
        """Check the part against the experiment.

        Raises:
            RefusedError: they contradict each other; names the keys.
        """
        ...


@runtime_checkable
class NamedChecked(Protocol):
    """A callback, or the class of a logger, that states what it needs of the rest of the configuration."""

    def check(self, experiment: ExperimentSettings, where: str) -> None:
        """Check the part at the key `where`, such as `callbacks.stop`, against the experiment.

        Raises:
            RefusedError: they contradict each other; names the keys.
        """
        ...
