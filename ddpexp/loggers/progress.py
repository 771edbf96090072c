"""Human-readable progress: in the terminal of the command, in the log, and on standard output without a command."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import lru_cache

from ddpexp.launch.workers.control import Control
from ddpexp.loggers.base import Logger
from ddpexp.settings.metrics import MEASURED
from ddpexp.system.text import metric_text, one_line

_MAX_RATES = 4  # of parameter groups, shown one by one


class ProgressLogger(Logger):
    """Show how far the run is, and its metrics."""

    def __init__(self, control: Control, log: logging.Logger, num_steps: int) -> None:
        """`num_steps` is the last step of the run."""
        self._control = control
        self._log = log
        self._num_steps = num_steps

    def scalars(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Show training metrics as progress, and evaluations as lines."""
        if any(name.startswith("train/") for name in values):
            training = {name.removeprefix("train/"): v for name, v in values.items() if not name.startswith(MEASURED)}
            shown = "  ".join(_training_texts(training))
            line = f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}  epoch {epoch:5.2f}  {shown}"
            brief = "  ".join(
                _shown(name, values[f"train/{name}"]) for name in ("loss", "accuracy") if f"train/{name}" in values
            )
            self._log.info(line, extra={"watched": self._control.watched, "printable": True})
            if not self._control.watched:
                return
            after = os.fstat(1).st_size  # the command prints this process's earlier output first
            self._control.send_nowait("progress", done=step, total=self._num_steps, text=brief, line=line, after=after)
        else:
            shown = "  ".join(_shown(name, value) for name, value in values.items())
            self._log.info(f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}  epoch {epoch:5.2f}  {shown}")


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
