"""What a run consists of on a rank, from its first step to its last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.optim import Optimizer

from ddpexp.data.streams import Batches
from ddpexp.distributed.world import World
from ddpexp.launch.workers.control import Control
from ddpexp.run.directory import RunDir
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.base import Strategy
from ddpexp.task import Schedule, Task
from ddpexp.train.precision import Precision
from ddpexp.train.task_step import CurrentProgress, step_of


@dataclass(frozen=True)
class TrainingRun:
    """The objects that steps, evaluations and records of a run share."""

    task: Task
    strategy: Strategy
    optimizers: Mapping[str, Optimizer]
    schedule: Schedule
    precision: Precision
    world: World
    control: Control
    train: Batches
    options: Trainer
    num_steps: int
    directory: RunDir | None = None  # without one nothing is profiled

    @cached_property
    def current(self) -> CurrentProgress:
        """Return how far the run is, for tasks."""
        device = self.world.device if self.options.compiles else None
        return CurrentProgress(self.num_steps, self.train.steps_per_epoch, device)

    @cached_property
    def task_step(self) -> Callable[[Any, Any], Any]:
        """Return the task's `step` as a function of model and batch."""
        return step_of(self.task, self.current)

    def epoch_after(self, step: int) -> float:
        """Return the number of epochs done after a step, as a fraction. Units: steps done."""
        return step / self.train.steps_per_epoch
