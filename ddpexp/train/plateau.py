"""A schedule that follows a metric: the learning rate is reduced when the metric no longer improves."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from ddpexp.errors import DdpexpError
from ddpexp.settings.experiment import ExperimentSettings
from ddpexp.settings.key import Key
from ddpexp.settings.metrics import check_is_evaluated, check_not_test
from ddpexp.system.text import counted
from ddpexp.train.schedule import Warmup


@dataclass(frozen=True)
class Plateau(Warmup):
    """The rate is multiplied by `gamma` after `patience` evaluations in a row without an improvement."""

    monitor: str = "eval/loss"
    mode: Literal["min", "max"] = "min"
    patience: Annotated[int, Key(at_least=1)] = 3
    min_delta: Annotated[float, Key(at_least=0, below=math.inf)] = 0.0
    gamma: Annotated[float, Key(at_least=0, below=1)] = 0.1
    cooldown: Annotated[int, Key(at_least=0)] = 0  # evaluations after a reduction that do not count
    floor: Annotated[float, Key(at_least=0, at_most=1)] = 0.0  # the factor gets no smaller

    def check(self, experiment: ExperimentSettings) -> None:
        """Check that there are evaluations, and that the metric is not of the test set; the workers check the rest."""
        check_not_test("scheduler.monitor", self.monitor, self.monitor)
        check_is_evaluated("scheduler.monitor", self.monitor, experiment.trainer.eval_every)


@dataclass
class PlateauProgress:
    """The schedule of a run: what the evaluations so far have made of the rate.

    Ranks: the same on all, without communication, because all have the same metrics.
    """

    schedule: Plateau
    reductions: int = field(init=False, default=0)
    best: float | None = field(init=False, default=None)
    waited: int = field(init=False, default=0)  # evaluations in a row without an improvement
    cooling: int = field(init=False, default=0)  # evaluations that still do not count

    @property
    def monitor(self) -> str:
        """Return the metric."""
        return self.schedule.monitor

    def factor(self, step: int, num_steps: int) -> float:
        """Return the factor at `step`, with the reductions so far."""
        schedule = self.schedule
        return schedule.factor(step, num_steps) * max(schedule.floor, schedule.gamma**self.reductions)

    def observe(self, metrics: Mapping[str, float], step: int, num_steps: int) -> None:
        """Take in an evaluation after `step` steps; those during the warm-up do not count."""
        schedule = self.schedule
        if schedule.monitor not in metrics:
            raise DdpexpError(
                f"names no metric of the evaluation: it has {', '.join(metrics)}",
                key="scheduler.monitor",
                value=schedule.monitor,
            )
        if step < schedule.first_step(num_steps):
            return
        value = metrics[schedule.monitor]
        if self._improves(value):
            self.best, self.waited = value, 0
        elif not self.cooling:
            self.waited += 1
        self.cooling = max(0, self.cooling - 1)
        if self.waited >= schedule.patience and schedule.gamma**self.reductions > schedule.floor:
            self.reductions, self.waited, self.cooling = self.reductions + 1, 0, schedule.cooldown
            times = counted(schedule.patience, "evaluation")
            if step < num_steps:
                logging.getLogger("ddpexp").info(
                    "%s has not improved for %s: the learning rate is optimizer.lr times %.6g from step %s on",
                    schedule.monitor, times, self.factor(step, num_steps), step + 1,
                )  # fmt: skip

    def _improves(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        delta = self.schedule.min_delta
        return value < self.best - delta if self.schedule.mode == "min" else value > self.best + delta

    def state_dict(self) -> dict[str, Any]:
        """Return what the evaluations so far have made of it."""
        return {"reductions": self.reductions, "best": self.best, "waited": self.waited, "cooling": self.cooling}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.reductions, self.best = int(state["reductions"]), state["best"]
        self.waited, self.cooling = int(state["waited"]), int(state["cooling"])
