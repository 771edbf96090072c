"""Schedules of `torch.optim.lr_scheduler`, which change the rates of an optimizer's groups and have a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ddpexp.errors import RefusedError
from ddpexp.train.schedule import Warmup

MODULE = "torch.optim.lr_scheduler."


@dataclass(frozen=True)
class TorchSchedule(Warmup):
    """A schedule of torch's after the warm-up: see `ddpexp.train.torch_rates`.

    `factor` is what the rates that torch's schedule gives are multiplied by.
    """

    schedule: Mapping[str, Any] = field(default_factory=dict)  # with a `_target_`
    interval: Literal["step", "epoch"] = "step"

    def __post_init__(self) -> None:
        """Check the values."""
        _check(self.schedule, "scheduler.schedule")


def _check(value: Any, key: str) -> None:
    """Check that a node, and those in its list `schedulers`, are schedules of torch's.

    Raises:
        RefusedError: one is not.
    """
    target = value.get("_target_") if isinstance(value, Mapping) else None
    if not isinstance(target, str) or not target.startswith(MODULE):
        raise RefusedError(
            key=f"{key}._target_",
            value=target,
            suggestion=f"Use one of {MODULE[:-1]}, such as {MODULE}StepLR. A schedule of your own is "
            "scheduler._target_=mine.Schedule.",
        )
    if target == f"{MODULE}ReduceLROnPlateau":
        raise RefusedError(
            "does what scheduler=plateau does", key=f"{key}._target_", value=target, suggestion="Use scheduler=plateau."
        )
    inner = value.get("schedulers", ())
    for number, node in enumerate(inner if isinstance(inner, Sequence) else ()):
        _check(node, f"{key}.schedulers[{number}]")
