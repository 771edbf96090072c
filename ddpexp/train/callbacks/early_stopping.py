"""Ends a run whose metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from ddpexp.errors import DdpexpError
from ddpexp.settings.experiment import ExperimentSettings
from ddpexp.settings.key import Key
from ddpexp.settings.metrics import check_is_evaluated, check_not_test
from ddpexp.system.text import counted
from ddpexp.train.callbacks.base import Callback, RunView


@dataclass
class EarlyStopping(Callback):
    """Requests the end after `patience` evaluations in a row without an improvement. Ranks: all, without communication.

    An improvement is a change by more than `min_delta` beyond the best value so far; NaN is none.
    """

    monitor: str = "eval/loss"
    mode: Literal["min", "max"] = "min"
    patience: Annotated[int, Key(at_least=1)] = 3
    min_delta: Annotated[float, Key(at_least=0, below=math.inf)] = 0.0
    best: float | None = field(init=False, default=None)
    best_step: int = field(init=False, default=0)
    waited: int = field(init=False, default=0)  # evaluations since the best one

    def check(self, experiment: ExperimentSettings, where: str) -> None:
        """Check that there are evaluations, and that the metric is not of the test set."""
        check_not_test(f"{where}.monitor", self.monitor, self.monitor)
        check_is_evaluated(f"{where}.monitor", self.monitor, experiment.trainer.eval_every)

    def on_start(self, run: RunView) -> None:
        """Have the metric checked."""
        run.monitor("monitor", self.monitor)

    def on_evaluated(self, run: RunView, metrics: Mapping[str, float]) -> None:
        """Compare the metric with the best one so far."""
        if self.monitor not in metrics:
            reason = f"is not a metric of the evaluation: it has {', '.join(metrics)}"
            raise DdpexpError(reason, key="monitor", value=self.monitor)
        value = metrics[self.monitor]
        if self._improves(value):
            self.best = value
            self.best_step = run.step
            self.waited = 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            count = counted(self.waited, "evaluation")
            by = f" by more than {self.min_delta:g}" if self.min_delta else ""
            best = "" if self.best is None else f"{self.best:.6g} at step {self.best_step}, "
            run.stop(f"{self.monitor} has not improved{by} for {count}: {best}{value:.6g} at step {run.step}")

    def _improves(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        return value < self.best - self.min_delta if self.mode == "min" else value > self.best + self.min_delta

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, its step, and the evaluations since."""
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.best = state["best"]
        self.best_step = int(state["best_step"])
        self.waited = int(state["waited"])
