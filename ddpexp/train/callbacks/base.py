"""The contract between a callback and a run. Free of torch, so that the command can check a callback's keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ddpexp.errors import DdpexpError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ddpexp.distributed.world import World
    from ddpexp.loggers.base import Logger
    from ddpexp.settings.experiment import ExperimentSettings
    from ddpexp.settings.trainer import Trainer
    from ddpexp.train.optimizer_step import Step
    from ddpexp.train.progress import TrainingProgress
    from ddpexp.train.run import TrainingRun


class Callback:
    """Base class of what is called at fixed moments of a run; a method that is not overridden is never called.

    Ranks: every method runs on all ranks, or on rank zero alone if the class sets `rank_zero_only`. None may
    communicate, unless the class sets `communicates`.
    """

    rank_zero_only: ClassVar[bool] = False
    communicates: ClassVar[bool] = False  # its methods call collectives, each alike on all ranks

    def check(self, experiment: ExperimentSettings, where: str) -> None:
        """Check the callback, whose key is `where`, against the rest of the configuration, before anything is built.

        Raises:
            RefusedError: they contradict each other; names the keys.
        """

    def on_start(self, run: RunView) -> None:
        """Run at every start, once the checkpoint is restored, before the first step; this state too is restored."""

    def on_gradients(self, run: RunView) -> None:
        """Run with the reduced and unscaled gradients of `run.gradients()`, before they are clipped and used.

        Once a step; of a task with a `train_step` of its own, in each `update.apply`. `run.step` counts the steps
        before this one.
        """

    def on_step(self, run: RunView) -> None:
        """Run after every optimizer step, before the step is recorded."""

    def on_evaluated(self, run: RunView, metrics: Mapping[str, float]) -> None:
        """Run after every evaluation, with metrics such as `eval/loss`; they are equal on all ranks."""

    def on_end(self, run: RunView) -> None:
        """Run when the run is done, before its last checkpoint is written; not when it is interrupted or fails."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a checkpoint is to hold: numbers, texts, tensors, lists and mappings. Ranks: rank zero."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what rank zero's `state_dict` returned, before `on_start`; only if a checkpoint holds it."""


@dataclass
class Requests:
    """What callbacks have requested of a run, and the first of their errors."""

    save: bool = False
    stop: str | None = None  # the reason
    error: str | None = None

    def __bool__(self) -> bool:
        """Return whether there is any."""
        return self.save or self.stop is not None or self.error is not None

    def clear(self) -> None:
        """Forget all of them."""
        self.save = False
        self.stop = None
        self.error = None


@dataclass
class RunView:
    """What a callback sees of its run: one object, always up to date."""

    _run: TrainingRun
    _requests: Requests
    logger: Logger  # only rank zero's logger records; every other rank has one that does nothing
    _progress: TrainingProgress
    _step: Step
    _register: Callable[[str, str], None]
    _parameters: Mapping[str, Tensor]  # of all models, by name
    caller: str = ""  # the key of the callback that is called
    communicates: bool = False  # whether its class may call collectives
    _stepping: Sequence[Optimizer] = ()  # in `on_gradients`, those that are about to use the gradients

    @property
    def num_steps(self) -> int:
        """Return the number of optimizer steps of the whole run."""
        return self._run.num_steps

    @property
    def models(self) -> Mapping[str, nn.Module]:
        """Return the models by name, as built; a single one is `model`."""
        return self._run.strategy.modules

    @property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """Return the optimizers by name."""
        return self._run.optimizers

    @property
    def step(self) -> int:
        """Return the number of optimizer steps done."""
        return self._progress.step

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of optimizer steps in an epoch."""
        return self._run.train.steps_per_epoch

    @property
    def options(self) -> Trainer:
        """Return the section `trainer` of the configuration."""
        return self._run.options

    @property
    def rank(self) -> int:
        """Return this process's rank."""
        return self._run.world.rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._run.world.world_size

    @property
    def device(self) -> torch.device:
        """Return this rank's device."""
        return self._run.world.device

    @property
    def world(self) -> World:
        """Return rank, device and collectives, which work with any number of workers.

        Raises:
            DdpexpError: the class of the callback does not set `communicates`.
        """
        if not self.communicates:
            raise DdpexpError(
                "it asks for run.world, and its class does not say that it communicates",
                suggestion="Set communicates = True in the class, and call collectives alike on every rank. "
                "run.rank, run.world_size and run.device are there for every callback.",
            )
        return self._run.world

    @property
    def epoch(self) -> float:
        """Return the number of epochs done, as a fraction."""
        return self._run.epoch_after(self._progress.step)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the last evaluation."""
        return self._progress.metrics

    @property
    def is_recorded(self) -> bool:
        """Return whether the training metrics are recorded after this step."""
        step = self._progress.step
        return step % self._run.options.log_every == 0 or step == self.num_steps

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of all models by names such as `model.0.weight`, sorted by name, tied ones once."""
        seen: set[int] = set()
        for name, parameter in self._parameters.items():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names such as `model.0.weight` with the gradients that are about to be used; in `on_gradients`."""
        waiting = {id(p) for optimizer in self._stepping for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in self.parameters():
            if id(parameter) in waiting and parameter.grad is not None:
                yield name, parameter.grad

    def held(self, name: str, tensor: Tensor) -> Tensor:
        """Return what this rank holds of a parameter or gradient: all of it, or some rows of a sharded one."""
        return self._run.strategy.shard(name, tensor).tensor

    @property
    def micro_batch_size(self) -> int:
        """Return the number of samples in a micro-batch."""
        return self._run.train.plan.micro_batch_size

    @property
    def micro_batch(self) -> int | None:
        """Return the number of this rank's micro-batch whose forward or backward pass is in progress; None: none.

        Units: from 0 in each step.
        """
        current = self._step.micro_batch_in_progress
        return None if current is None else current.number % self._run.train.plan.gradient_accumulation_steps

    def samples(self, rows: Sequence[int]) -> str:
        """Describe the samples in these rows of the micro-batch in progress, by their indices in the data set."""
        return self._run.train.describe(self.step, self.micro_batch or 0, rows)

    def monitor(self, key: str, metric: str) -> None:
        """Announce in `on_start` that this callback reads a metric, which its key `key` names.

        The run is refused if it does not evaluate that set, and after its first step if there is no such metric.

        Raises:
            RefusedError: there is no such set.
        """
        self._register(f"callbacks.{self.caller}.{key}", metric)

    def save(self) -> None:
        """Request a checkpoint: of this step in `on_evaluated`, else of the next step that is recorded or evaluated."""
        self._requests.save = True

    def stop(self, reason: str) -> None:
        """Request the end of the run for a reason, a sentence without full stop; when, is as for `save`.

        One rank's request is enough. The run is then done, not interrupted.
        """
        if self._requests.stop is None:
            self._requests.stop = f"callbacks.{self.caller}: {reason}"
