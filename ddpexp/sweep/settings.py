"""The section `sweep` of the configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ddpexp.config.build import build
from ddpexp.config.validate import check_not_test
from ddpexp.errors import RefusedError


@dataclass(frozen=True)
class Settings:
    """How a sweep runs its jobs; every field is explained in conf/config.yaml."""

    slots: Literal["auto"] | int = "auto"
    objective: str | None = None
    mode: Literal["min", "max"] = "min"
    picture: bool = True
    on_failure: Literal["continue", "stop"] = "continue"
    early_stop: Literal["median", "halving"] | None = None
    early_stop_after: int = 1
    early_stop_factor: int = 3
    retries: int = 0


def settings_of(values: Mapping[str, Any]) -> Settings:
    """Read the section.

    Raises:
        RefusedError: an unknown key, or a value that means nothing.
    """
    settings = build(Settings, values, "sweep")
    if settings.slots != "auto" and settings.slots < 1:
        raise RefusedError(f"sweep.slots={settings.slots} runs nothing: use 1 or more, or auto.")
    if settings.retries < 0:
        raise RefusedError(f"sweep.retries={settings.retries}: use 0 or more.")
    with_mode = re.fullmatch(r"(min|max):(.+)", settings.objective or "")
    if with_mode is not None:
        raise RefusedError(
            f"sweep.objective={settings.objective} is not the name of a metric: type sweep.mode={with_mode[1]} "
            f"sweep.objective={with_mode[2]}."
        )
    if settings.objective is not None:
        check_not_test(f"sweep.objective={settings.objective}", settings.objective)
    if settings.early_stop is not None and settings.objective is None:
        raise RefusedError(
            f"sweep.early_stop={settings.early_stop} compares objectives: name one with sweep.objective=eval/loss."
        )
    if settings.early_stop_after < 1:
        raise RefusedError(f"sweep.early_stop_after={settings.early_stop_after}: use a step from 1.")
    if settings.early_stop_factor < 2:
        raise RefusedError(f"sweep.early_stop_factor={settings.early_stop_factor} stops nothing: use 2 or more.")
    return settings
