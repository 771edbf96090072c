"""The call of a task's `step`, with the progress of the run where its signature asks for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ddpexp.task import HasEmbed, Progress


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


def global_loss_of(task: Any) -> HasEmbed | None:
    """Return the task if its loss is over the global batch: if it has `embed` and `loss` in place of `step`."""
    return task if isinstance(task, HasEmbed) and not hasattr(task, "step") else None


def functions_of(task: Any) -> list[Callable[..., Any]]:
    """Return the functions of a task that compute a loss; the last one returns it."""
    global_loss = global_loss_of(task)
    return [task.step] if global_loss is None else [global_loss.embed, global_loss.loss]


def function_of(task: Any) -> Callable[..., Any]:
    """Return the function of a task that returns the loss, for errors."""
    return functions_of(task)[-1]


def wants_progress(task: Any) -> bool:
    """Return whether a function of the task has an argument `progress`."""
    return any("progress" in inspect.signature(function).parameters for function in functions_of(task))


def with_progress(function: Callable[..., Any], current: CurrentProgress) -> Callable[..., Any]:
    """Return the function without its argument `progress`, if it has one."""
    if "progress" not in inspect.signature(function).parameters:
        return function
    return lambda *arguments: function(*arguments, progress=current.value)


def step_of(task: Any, current: CurrentProgress) -> Callable[[Any, Any], Any]:
    """Return the task's `step` as a function of model and batch; of a loss over the global batch, that of the batch."""
    global_loss = global_loss_of(task)
    if global_loss is None:
        return with_progress(task.step, current)
    embed, loss = (with_progress(function, current) for function in functions_of(task))
    return lambda model, batch: loss(model, embed(model, batch))
