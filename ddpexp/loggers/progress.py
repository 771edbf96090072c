"""Human-readable progress: in the terminal of the command, in the log, and on standard output without a command."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import lru_cache

from ddpexp.launch.workers.control import Control
from ddpexp.loggers.base import Logger
from ddpexp.settings.metrics import MEASURED, STEP_PARTS, TIMES
from ddpexp.system.text import duration, metric_text, one_line

_LARGE_SHARE = 0.1  # of a step
_STEP_PARTS = tuple(f"{TIMES}{name}" for name in STEP_PARTS)
_MAX_RATES = 4  # of parameter groups, shown one by one


class ProgressLogger(Logger):
    """Show how far the run is, and its metrics."""

    def __init__(
        self,
        control: Control,
        log: logging.Logger,
        num_steps: int,
        next_evaluation: Callable[[int], int | None] = lambda step: None,
    ) -> None:
        """`num_steps` is the last step of the run; `next_evaluation` gives the next one that is evaluated."""
        self._control = control
        self._log = log
        self._num_steps = num_steps
        self._next_evaluation = next_evaluation
        self._first: tuple[int, float] | None = None  # the step and the time of the first record of this start

    def scalars(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Show training metrics as progress, and evaluations as lines."""
        if any(name.startswith("train/") for name in values):
            training = {name.removeprefix("train/"): v for name, v in values.items() if not name.startswith(MEASURED)}
            left = self._time_left(step, time.monotonic())
            shown = "  ".join([*_training_texts(training), *(text for text in (waits_text(values), left) if text)])
            line = f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}  epoch {epoch:5.2f}  {shown}"
            brief = "  ".join(
                _shown(name, values[f"train/{name}"]) for name in ("loss", "accuracy") if f"train/{name}" in values
            )
            self._log.info(line, extra={"watched": self._control.watched, "printable": True})
            if not self._control.watched:
                return
            after = os.fstat(1).st_size  # the command prints this process's earlier output first
            times = ", ".join(filter(None, [left, self._time_to_evaluation(step, step_seconds(values))]))
            brief = "  ".join(filter(None, [brief, waits_text(values), times]))
            self._control.send_nowait("progress", done=step, total=self._num_steps, text=brief, line=line, after=after)
        else:
            shown = "  ".join(_shown(name, value) for name, value in values.items())
            self._log.info(f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}  epoch {epoch:5.2f}  {shown}")

    def _time_left(self, step: int, now: float) -> str:
        """Return how long it is to the end, with evaluations and checkpoints as so far."""
        self._first = self._first or (step, now)
        first, began = self._first
        if not first < step < self._num_steps:
            return ""
        return f"{duration((self._num_steps - step) * (now - began) / (step - first))} left"

    def _time_to_evaluation(self, step: int, seconds: float) -> str:
        """Return how long it is to the next evaluation, unless that is the one at the end."""
        evaluation = self._next_evaluation(step)
        if not seconds or evaluation is None or evaluation >= self._num_steps:
            return ""
        return f"evaluation in {duration((evaluation - step) * seconds)}"


def step_seconds(values: Mapping[str, float]) -> float:
    """Return how long a step takes, by the times in a record; 0 where it has none."""
    return sum([values.get(name, 0.0) for name in _STEP_PARTS])


def waits_text(values: Mapping[str, float]) -> str:
    """Return which part of a step the workers wait for data, if it is a large one."""
    share = values.get(f"{TIMES}data", 0.0) / (step_seconds(values) or 1.0)
    return f"waits for data {share:.0%}" if share >= _LARGE_SHARE else ""


def _training_texts(values: Mapping[str, float]) -> list[str]:
    """Return each value as text; many rates of parameter groups together, as the lowest and the highest."""
    rates = {name: value for name, value in values.items() if name.startswith("lr/")}
    if len(rates) <= _MAX_RATES:
        return [_shown(name, value) for name, value in values.items()]
    low, high = (metric_text("lr", rate) for rate in (min(rates.values()), max(rates.values())))
    together = {next(iter(rates)): f"lr {low} to {high} in {len(rates)} groups"}
    return [
        together.get(name, "") or _shown(name, value)
        for name, value in values.items()
        if name not in rates or name in together
    ]


def _shown(name: str, value: float) -> str:
    name = _one_line(name)  # chosen by the recipe
    if name in ("samples_per_second", "tokens_per_second"):
        return f"{value:,.0f} {name.partition('_')[0]}/s"
    return f"{name} {metric_text(name, value)}"


@lru_cache(1024)
def _one_line(name: str) -> str:
    """Return the name in a form that is safe to print in one line; cached, since it is the same in every record."""
    return one_line(name)
