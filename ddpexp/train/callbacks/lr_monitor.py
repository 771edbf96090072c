"""Records the learning rate of every parameter group."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ddpexp.errors import RefusedError
from ddpexp.settings.key import Key
from ddpexp.train.callbacks.base import Callback, RunView

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class LRMonitor(Callback):
    """Records `lr/OPTIMIZER/GROUP` every so many steps, and other settings of the groups. Ranks: rank zero."""

    rank_zero_only: ClassVar[bool] = True
    every: Annotated[int | None, Key(at_least=1)] = None
    settings: tuple[str, ...] = ()

    def on_start(self, run: RunView) -> None:
        """Check that the groups have the settings, and warn where the record has all of it anyway.

        Raises:
            RefusedError: some have not.
        """
        groups = [group for optimizer in run.optimizers.values() for group in optimizer.param_groups]
        for name in self.settings:
            if not any(name in group for group in groups):
                known = sorted({key for group in groups for key, value in group.items() if _numbers(key, value)})
                raise RefusedError(
                    "is not a setting of a parameter group",
                    key="settings",
                    value=f"[{name}]",
                    suggestion=f"Available: {', '.join(known)}.",
                )
        if self.every is None and not self.settings:
            key = f"callbacks.{run.caller}"
            logging.getLogger("ddpexp").warning(
                f"{key} repeats the rates that every record has as train/lr. For other steps set {key}.every, for "
                f"other settings {key}.settings, or leave the callback out."
            )

    def on_step(self, run: RunView) -> None:
        """Record, if this step is to be."""
        if run.is_recorded if self.every is None else run.step % self.every == 0:
            run.logger.scalars(run.step, run.epoch, dict(_values(run.optimizers, ("lr", *self.settings))))


def _values(optimizers: Mapping[str, Optimizer], settings: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    for optimizer_name, optimizer in optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            for key in settings:
                for suffix, value in _numbers(key, group.get(key)).items():
                    yield f"{key}/{optimizer_name}/{group.get('name', number)}{suffix}", value


def _numbers(key: str, value: Any) -> dict[str, float]:
    """Return the numbers of a setting by the suffixes of their names: one, or several as of betas."""
    if key == "params" or value is None:
        return {}
    if isinstance(value, tuple | list):
        return {f"/{number}": float(inner) for number, inner in enumerate(value) if isinstance(inner, int | float)}
    try:
        return {"": float(value)}
    except (TypeError, ValueError):
        return {}
