"""The section `sweep` of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ddpexp.config.build import build
from ddpexp.errors import RefusedError


@dataclass(frozen=True)
class Settings:
    """How a sweep runs its jobs; every field is explained in conf/config.yaml."""

    slots: Literal["auto"] | int = "auto"
    objective: str | None = None
    mode: Literal["min", "max"] = "min"
    on_failure: Literal["continue", "stop"] = "continue"
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
    return settings
