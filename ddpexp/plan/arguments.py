"""The arguments of `ddpexp plan`: the overrides of a run, and the plan's options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from ddpexp.settings.key import Key

_Number: TypeAlias = Annotated[float | None, Key(above=0, below=math.inf, use="a number above 0")]
_Count: TypeAlias = Annotated[int | None, Key(above=0, use="a whole number above 0")]


@dataclass(frozen=True)
class PlanArguments:
    """What was typed."""

    run: Sequence[str] = ()  # its arguments, as for a training
    json: bool = False
    calibrate: bool = False
    alpha_us: _Number = None
    bandwidth_gbps: _Number = None
    compute_ms: _Number = None
    num_samples: _Count = None
    cores: _Count = None
    strategies: bool = False
    memory_gb: _Number = None
    plot_schedule: Annotated[str | None, Key(pattern=r"|.*\.png", use="the name of a PNG file, or none")] = None
    # the file for the picture; empty: only the terminal
