"""The call of a task's `step`, with the progress of the run where its signature asks for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ddpexp.task import Progress, Task


class CurrentProgress:
    """How far a run is in the step in progress; in an evaluation, in the step before it."""

    def __init__(self, num_steps: int = 1, steps_per_epoch: float = 1, device: torch.device | None = None) -> None:
        """Begin at step 0. With a `device` the values are tensors there: for a compiled model they are no constants."""
        self._num_steps = num_steps
        self._steps_per_epoch = steps_per_epoch
        self._device = device
        self.set(0)

    def set(self, step: int) -> None:
        """Note the step in progress. Units: steps, from 0."""
        values: dict[str, Any] = {
            "step": step,
            "num_steps": self._num_steps,
            "epoch": step / self._steps_per_epoch,
            "fraction": step / self._num_steps,
        }
        if self._device is not None:
            values = {name: torch.tensor(value, device=self._device) for name, value in values.items()}
        self.value = Progress(**values)


def wants_progress(task: Task) -> bool:
    """Return whether the task's `step` has an argument `progress`."""
    return "progress" in inspect.signature(task.step).parameters


def step_of(task: Task, current: CurrentProgress) -> Callable[[Any, Any], Any]:
    """Return the task's `step` as a function of model and batch."""
    step: Callable[..., Any] = task.step
    if not wants_progress(task):
        return step
    return lambda model, batch: step(model, batch, progress=current.value)
