"""The learning rates that schedules of `torch.optim.lr_scheduler` give, with their state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddpexp.compat.schedules import COMBINED
from ddpexp.config.instantiate import Trust, instantiate
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.settings.node import Node
from ddpexp.train.torch_schedule import MODULE, TorchSchedule

_CYCLED = ("momentum", "betas")  # what OneCycleLR and CyclicLR change beside the rate


@dataclass(frozen=True)
class TorchRates:
    """A schedule of torch's, from which one is built for each optimizer of a run."""

    config: TorchSchedule
    trust: Trust  # for functions that the configuration names

    def factor(self, step: int, num_steps: int) -> float:
        """Return what the rates of torch's schedule are multiplied by."""
        return self.config.factor(step, num_steps)

    @property
    def cycles(self) -> bool:
        """Return whether it changes momentum, too, as OneCycleLR and CyclicLR do."""
        return any(name in str(self.config.schedule) for name in ("OneCycleLR", "CyclicLR"))

    def num_calls(self, step: int, num_steps: int, steps_per_epoch: int) -> int:
        """Return how often torch's schedule has stepped at a step."""
        steps = max(0, step - self.config.first_step(num_steps))
        return steps if self.config.interval == "step" else steps // steps_per_epoch


class _Shadow(Optimizer):
    """Stands in for an optimizer: the same groups with a parameter each. A schedule of torch's changes it alone."""

    def __init__(self, optimizer: Optimizer) -> None:
        groups = [
            {**group, "params": [torch.nn.Parameter()], "lr": float(group["lr"])} for group in optimizer.param_groups
        ]
        super().__init__(groups, dict(optimizer.defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: schedules want it called before their own."""


class OptimizerRates:
    """A schedule of torch's for one optimizer.

    It runs on a shadow, so that neither the strategy's optimizer nor its checkpoint knows of it.
    """

    def __init__(self, optimizer: Optimizer, schedule: TorchRates) -> None:
        """Build the schedule for the groups as built.

        Raises:
            RefusedError: it cannot be built for this optimizer.
        """
        self._shadow = _Shadow(optimizer)
        self._count = 0  # how often it has stepped
        node = schedule.config.schedule
        try:
            self._schedule = _build(node, self._shadow, schedule.trust, "scheduler.schedule")
        except (TypeError, ValueError) as error:
            raise RefusedError(
                f"cannot be built: {error}", key="scheduler.schedule._target_", value=node["_target_"]
            ) from None
        self._built = _plain(self._schedule.state_dict())

    def advance(self, count: int) -> None:
        """Step until it has been done `count` times.

        Raises:
            DdpexpError: torch's schedule has an end, and this is after it.
        """
        while self._count < count:
            self._shadow.step()
            try:
                self._schedule.step()
            except ValueError as error:
                raise DdpexpError(
                    f"{type(self._schedule).__name__} ended before the run: {error}", key="scheduler.schedule"
                ) from None
            self._count += 1

    def apply(self, optimizer: Optimizer, factor: float) -> None:
        """Give the optimizer's groups their rates, times `factor`."""
        for group, source in zip(optimizer.param_groups, self._shadow.param_groups, strict=True):
            group["lr"] = float(source["lr"]) * factor
            group.update({key: source[key] for key in _CYCLED if key in source})

    def state(self) -> dict[str, Any]:
        """Return what has changed since it was built; the settings stay those of the configuration."""
        groups = [
            {key: source[key] for key in ("lr", *_CYCLED) if key in source} for source in self._shadow.param_groups
        ]
        changed = _changed(_plain(self._schedule.state_dict()), self._built)
        return {"count": self._count, "groups": groups, "schedule": changed}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._count = int(state["count"])
        for group, saved in zip(self._shadow.param_groups, state["groups"], strict=True):
            group.update(saved)
        self._schedule.load_state_dict(_merged(self._schedule.state_dict(), state["schedule"]))


def _build(node: Mapping[str, Any], optimizer: Optimizer, trust: Trust, where: str) -> LRScheduler:
    """Build a schedule, and first those that it combines, each with the optimizer as its first argument."""
    kwargs = {key: value for key, value in node.items() if key != "_target_"}
    if "schedulers" in kwargs:
        kwargs["schedulers"] = [
            _build(inner, optimizer, trust, f"{where}.schedulers[{number}]")
            for number, inner in enumerate(kwargs["schedulers"])
        ]
    first: tuple[Any, ...] = (optimizer,)
    if node["_target_"] == f"{MODULE}ChainedScheduler":
        first, kwargs = (kwargs.pop("schedulers"),), {**kwargs, "optimizer": optimizer}
    schedule: LRScheduler = instantiate(Node(node["_target_"], kwargs), trust, where, *first)
    return schedule


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of a state, and those of the schedules that it combines."""
    inner = {COMBINED: [_plain(one) for one in values[COMBINED]]} if COMBINED in values else {}
    return {key: value for key, value in values.items() if _is_plain(value)} | inner


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _changed(now: Mapping[str, Any], built: Mapping[str, Any]) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    if COMBINED in now:
        pairs = zip(now[COMBINED], built[COMBINED], strict=True)
        inner[COMBINED] = [_changed(one, other) for one, other in pairs]
    changed = {key: value for key, value in now.items() if key != COMBINED and value != built.get(key)}
    return changed | inner


def _merged(state: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with the values that a checkpoint has; keys that the schedule does not have are left out."""
    merged = {key: changed.get(key, value) for key, value in state.items()}
    if COMBINED in state:
        saved: Sequence[Mapping[str, Any]] = changed[COMBINED]
        merged[COMBINED] = [_merged(one, other) for one, other in zip(state[COMBINED], saved, strict=True)]
    return merged
