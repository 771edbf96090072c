"""The learning rates of a run: those of every parameter group, as its schedule has them at a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from ddpexp.errors import RefusedError
from ddpexp.task import Schedule, StatefulSchedule
from ddpexp.train.optimizers import group_suffixes
from ddpexp.train.plateau import PlateauProgress
from ddpexp.train.torch_rates import OptimizerRates, TorchRates


class LearningRates:
    """Sets the rates before each step, and keeps the state of schedules that have one."""

    def __init__(
        self, optimizers: Mapping[str, Optimizer], schedule: Schedule, num_steps: int, steps_per_epoch: int
    ) -> None:
        """Remember the rates as built, before a checkpoint or the schedule changes them."""
        self._optimizers, self._schedule = optimizers, schedule
        self._num_steps, self._steps_per_epoch = num_steps, steps_per_epoch
        self._built = [(one, [group["lr"] for group in one.param_groups]) for one in optimizers.values()]
        self._torch: dict[str, OptimizerRates] = {}
        if isinstance(schedule, TorchRates):
            self._torch = {name: OptimizerRates(optimizer, schedule) for name, optimizer in optimizers.items()}
        self._suffixes = group_suffixes(optimizers, bool(self._torch))

    @property
    def monitor(self) -> str | None:
        """Return the metric that scheduler.monitor names."""
        return self._schedule.monitor if isinstance(self._schedule, PlateauProgress) else None

    def set(self, step: int) -> None:
        """Set the rate of every parameter group for a step."""
        factor = float(self._schedule.factor(step, self._num_steps))
        if self._torch and isinstance(self._schedule, TorchRates):
            count = self._schedule.num_calls(step, self._num_steps, self._steps_per_epoch)
            for name, rates in self._torch.items():
                rates.advance(count)
                rates.apply(self._optimizers[name], factor)
            return
        for optimizer, rates_as_built in self._built:
            for group, rate in zip(optimizer.param_groups, rates_as_built, strict=True):
                group["lr"] = rate * factor

    def recorded(self) -> dict[str, float]:
        """Return the rates of the last step, by the suffix that each has in records after `lr`."""
        groups = [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]
        return {suffix: float(groups[number]["lr"]) for suffix, number in self._suffixes.items()}

    def observe(self, metrics: Mapping[str, float], step: int) -> None:
        """Show the schedule an evaluation after `step` steps. Ranks: all, with the same metrics."""
        if isinstance(self._schedule, StatefulSchedule):
            self._schedule.observe(metrics, step, self._num_steps)

    def state(self) -> dict[str, Any]:
        """Return the state of the schedule for a checkpoint; most have none."""
        if isinstance(self._schedule, StatefulSchedule):
            return {"of": type(self._schedule).__name__, "state": dict(self._schedule.state_dict())}
        if self._torch:
            return {"of": "torch", "state": {name: rates.state() for name, rates in self._torch.items()}}
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state` returned; that of another schedule is left out.

        Raises:
            RefusedError: it does not fit this schedule.
        """
        kind = "torch" if self._torch else type(self._schedule).__name__
        if saved.get("of") != kind:
            return
        state = saved["state"]
        try:
            for name, rates in self._torch.items():
                rates.restore(state[name])
            if isinstance(self._schedule, StatefulSchedule):
                self._schedule.load_state_dict(state)
        except (KeyError, ValueError, TypeError) as error:
            raise RefusedError(
                f"does not fit the schedule of this run ({type(error).__name__}: {error})",
                suggestion="Keep the scheduler that the run was started with.",
                place="schedule",
            ) from None
