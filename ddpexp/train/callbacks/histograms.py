"""Records histograms of weights and gradients."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from ddpexp.errors import RefusedError
from ddpexp.settings.experiment import ExperimentSettings
from ddpexp.settings.key import Key
from ddpexp.train.callbacks.base import Callback, RunView

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Histograms(Callback):
    """Records `weights/NAME` and `gradients/NAME` every so many steps. Ranks: rank zero.

    Of a sharded parameter it records what rank zero holds. Numbers that are not finite are left out.
    """

    rank_zero_only: ClassVar[bool] = True
    every: Annotated[Literal["epoch"] | int, Key(at_least=1)] = "epoch"
    weights: bool = True
    gradients: bool = True

    def check(self, experiment: ExperimentSettings, where: str) -> None:
        """Check that there is something to record, and a logger that may have it."""
        if not (self.weights or self.gradients):
            raise RefusedError(
                "leaves nothing to record",
                key=f"{where}.weights=false {where}.gradients",
                value=False,
                suggestion="Leave the callback out.",
            )
        if not experiment.logger:
            raise RefusedError(
                "records histograms, which metrics.jsonl cannot hold",
                key=where,
                suggestion="Use logger=tensorboard, or another logger that records histograms.",
            )

    def on_start(self, run: RunView) -> None:
        """Warn where the run ends before any step is due."""
        if self._period(run) > run.num_steps:
            key, epoch = f"callbacks.{run.caller}.every", f" (an epoch has {run.steps_per_epoch})"
            logging.getLogger("ddpexp").warning(
                f"{key}={self.every}: nothing is recorded, since the run ends at step {run.num_steps}"
                f"{epoch if self.every == 'epoch' else ''}. Use fewer steps, "
                f"such as {key}={max(1, run.num_steps // 10)}."
            )

    def on_gradients(self, run: RunView) -> None:
        """Record the gradients of a step that is due."""
        if self.gradients and self._is_due(run.step + 1, run):
            for name, gradient in run.gradients():
                _record(run, f"gradients/{name}", run.held(name, gradient), run.step + 1)

    def on_step(self, run: RunView) -> None:
        """Record the weights after a step that is due."""
        if self.weights and self._is_due(run.step, run):
            for name, parameter in run.parameters():
                _record(run, f"weights/{name}", run.held(name, parameter), run.step)

    def _is_due(self, step: int, run: RunView) -> bool:
        return step % self._period(run) == 0

    def _period(self, run: RunView) -> int:
        return run.steps_per_epoch if self.every == "epoch" else self.every


def _record(run: RunView, name: str, tensor: Tensor, step: int) -> None:
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    if values.is_complex():
        values = values.abs()
    values = values.float()
    finite = values[values.isfinite()]
    if finite.numel():
        run.logger.histogram(name, finite, step)
