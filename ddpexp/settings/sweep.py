"""The section `sweep`: how the jobs of a sweep run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ddpexp.settings.key import Key
from ddpexp.settings.trainer import Auto


@dataclass(frozen=True)
class Sweep:
    """How a sweep runs its jobs; conf/config.yaml has the default of every key and explains it."""

    slots: Annotated[Auto | int, Key(at_least=1)]
    objective: Annotated[str | None, Key(also="optimized_metric")]
    mode: Annotated[Literal["min", "max"], Key(synonyms={"max": "maximize maximise", "min": "minimize minimise"})]
    picture: bool
    on_failure: Literal["continue", "stop"]
    early_stop: Literal["median", "halving"] | None
    early_stop_after: Annotated[int, Key(at_least=1)]
    early_stop_factor: Annotated[int, Key(at_least=2)]
    retries: Annotated[int, Key(at_least=0)]
