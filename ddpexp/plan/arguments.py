"""The arguments of `ddpexp plan`: the overrides of a run, and the plan's options."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpexp.errors import RefusedError

_NUMBERS = ("--alpha_us", "--bandwidth_gbps", "--compute_ms", "--memory_gb")
_COUNTS = ("--num_samples", "--cores")
_PLOT = "--plot-schedule"  # with a file, or without


@dataclass(frozen=True)
class PlanArguments:
    """The parsed arguments."""

    run: tuple[str, ...]  # its arguments, as for a training
    json: bool = False
    calibrate: bool = False
    alpha_us: float | None = None
    bandwidth_gbps: float | None = None
    compute_ms: float | None = None
    num_samples: int | None = None
    cores: int | None = None
    strategies: bool = False
    memory_gb: float | None = None
    plot: str | None = None  # the file for the picture of the schedule; empty: only the terminal

    @classmethod
    def of(cls, operands: Sequence[str], options: Mapping[str, str]) -> PlanArguments:
        """Read the overrides of a run and the options.

        Raises:
            RefusedError: an invalid value.
        """
        plot = options.get(_PLOT)
        if plot and not plot.endswith(".png"):
            raise RefusedError(
                "is not the name of a PNG file",
                key=f"plan {_PLOT}",
                value=plot,
                suggestion="Name a file that ends with .png, or none.",
            )
        numbers = {name: _number(name, options[name]) for name in (*_NUMBERS, *_COUNTS) if name in options}
        for name in _COUNTS:
            if name in numbers and not numbers[name].is_integer():
                raise RefusedError(key=f"plan {name}", value=options[name], suggestion="Use a whole number.")
        fields: dict[str, Any] = {name.removeprefix("--"): numbers[name] for name in _NUMBERS if name in numbers}
        fields |= {name.removeprefix("--"): int(numbers[name]) for name in _COUNTS if name in numbers}
        switches = {name: f"--{name}" in options for name in ("json", "calibrate", "strategies")}
        return cls(tuple(operands), plot=plot, **switches, **fields)


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise RefusedError(suggestion="Use a number above 0.", place=f"plan {key}={text}")
    return value
