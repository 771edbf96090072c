"""Read the section `sweep` of the configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ddpexp.config.build import build
from ddpexp.errors import RefusedError
from ddpexp.settings.metrics import check_not_test
from ddpexp.settings.run import Sweep


def settings_of(values: Mapping[str, Any]) -> Sweep:
    """Read the section.

    Raises:
        RefusedError: an unknown key, or a value that means nothing.
    """
    settings = build(Sweep, values, "sweep")
    with_mode = re.fullmatch(r"(min|max):(.+)", settings.objective or "")
    if with_mode is not None:
        raise RefusedError(
            "is not the name of a metric",
            key="sweep.objective",
            value=settings.objective,
            suggestion=f"Type sweep.mode={with_mode[1]} sweep.objective={with_mode[2]}.",
        )
    if settings.objective is not None:
        check_not_test("sweep.objective", settings.objective, settings.objective)
    if settings.early_stop is not None and settings.objective is None:
        raise RefusedError(
            "compares jobs by their objective, but sweep.objective is not set",
            key="sweep.early_stop",
            value=settings.early_stop,
            suggestion="Name one with sweep.objective=eval/loss.",
        )
    return settings
