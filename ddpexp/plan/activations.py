"""What a forward pass keeps for backward, found by one pass without memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ddpexp.compat.dispatch import memory_of
from ddpexp.config.instantiate import instantiate
from ddpexp.config.schema import Experiment
from ddpexp.config.strategies import estimator_of
from ddpexp.data.samples import tensors_of
from ddpexp.strategy.module_classes import check_classes, outermost
from ddpexp.strategy.replica import Models
from ddpexp.task import HasTrainStep, Task
from ddpexp.train.task_step import CurrentProgress, step_of


@dataclass(frozen=True)
class Activations:
    """The memory of a forward and backward pass, without parameters and buffers. Units: bytes."""

    of_stages: Sequence[int]  # kept for backward by each stage of a pipeline, else by the whole model; of modules that
    # are computed again their inputs, and the most that one keeps
    again_bytes: int  # of these the last
    temporary_bytes: int  # of operations in backward: a gradient comes in and another goes out


def measure(
    experiment: Experiment, models: Models, single: bool, batch: Any, notes: dict[str, str]
) -> Activations | None:
    """Return what a pass takes; None, with a note, where that cannot be found without memory."""
    task: Task = instantiate(experiment.task, experiment.trust, "task")
    if isinstance(task, HasTrainStep):
        notes["activations"] = "left out: the task's own train_step defines the step"
        return None
    classes = experiment.trainer.activation_checkpointing or ()
    check_classes(models, classes, "trainer.activation_checkpointing=[{}]")
    for module in models.values():
        module.train()
    again = [module for model in models.values() for module in outermost(model, classes)]
    kept = _Kept({memory_of(t.untyped_storage()) for m in models.values() for t in (*m.parameters(), *m.buffers())})
    try:
        with kept.watching(again):
            staged = estimator_of(experiment.strategy).in_stages(models, kept.enter_stage)
            step_of(task, CurrentProgress())(staged or (models["model"] if single else models), batch)
    except Exception as error:
        notes["activations"] = (
            f"left out: a forward pass without memory is not possible ({type(error).__name__}: {error}); "
            "python -m ddpexp check shows whether the model takes the data"
        )
        return None
    notes["activations"] = "kept for backward" + (
        ", and what one of the modules keeps that are computed again" * bool(again)
    )
    if experiment.trainer.precision != "fp32":
        notes["activations"] = f"at most: measured in fp32, and {experiment.trainer.precision} keeps less"
    return kept.result()


@dataclass
class _Kept:
    """The memory that is kept for backward, each once: outside of modules that are computed again, and in each."""

    known: set[int]  # memory that is counted elsewhere
    outside: dict[int, torch.UntypedStorage] = field(default_factory=dict)  # held: no other gets the same address
    inside: list[dict[int, torch.UntypedStorage]] = field(default_factory=list)
    current: list[dict[int, torch.UntypedStorage]] = field(default_factory=list)
    earlier: list[dict[int, torch.UntypedStorage]] = field(default_factory=list)  # outside, in stages before this one

    @contextmanager
    def watching(self, again: list[nn.Module]) -> Iterator[None]:
        """Count what is kept inside the block; `again` are the modules that are computed again."""
        self.current = [self.outside]
        hooks = [module.register_forward_pre_hook(self._enter, with_kwargs=True) for module in again]
        hooks += [module.register_forward_hook(self._leave) for module in again]
        try:
            with saved_tensors_hooks(self._keep, _same):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def result(self) -> Activations:
        """Return the sums."""
        most = max((sum(s.nbytes() for s in one.values()) for one in self.inside), default=0)
        stages = [*self.earlier, self.outside]
        everything = [storage for one in (*stages, *self.inside) for storage in one.values()]
        largest = max((storage.nbytes() for storage in everything), default=0)
        return Activations([sum(s.nbytes() for s in one.values()) + most for one in stages], most, 2 * largest)

    def enter_stage(self, stage: int, x: Any) -> None:
        """Begin a stage of a pipeline, for which what the one before has returned is kept twice."""
        if stage:
            self._keep_all(x)
            self.earlier.append(self.outside)
            self.outside = self.current[0] = {}
            self._keep_all(x)

    def _keep_all(self, values: Any) -> None:
        for tensor in tensors_of(values):
            self._keep(tensor)

    def _enter(self, _module: nn.Module, arguments: Any, named: Any) -> None:
        self._keep_all((arguments, named))
        self.inside.append({})
        self.current.append(self.inside[-1])

    def _leave(self, *_: Any) -> None:
        self.current.pop()

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        memory = memory_of(storage)
        if memory not in self.known and memory not in self.outside:
            self.current[-1][memory] = storage
        return tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor
