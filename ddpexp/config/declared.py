"""Every key that is declared, for suggestions: of the sections of all runs, and of our kinds of strategies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from ddpexp.config.registry import keys_of
from ddpexp.config.strategies import options_of
from ddpexp.settings.data import CommonData
from ddpexp.settings.key import Key, declarations
from ddpexp.settings.run import Predict, Recipe, Run
from ddpexp.settings.sweep import Sweep
from ddpexp.settings.trainer import Trainer

SECTIONS: Mapping[str, type] = {
    "recipe": Recipe, "trainer": Trainer, "data": CommonData, "run": Run, "predict": Predict, "sweep": Sweep,
}  # fmt: skip
"""The sections whose keys are those of a class; those of `data` are the keys of every kind."""


@cache
def declared() -> Mapping[str, tuple[Key, Any]]:
    """Return what is declared of each key, and its type, by the key as it is typed."""
    strategies = [options for kind in keys_of("strategy") if (options := options_of(kind)) is not None]
    sections = [*SECTIONS.items(), *(("strategy", options) for options in strategies)]
    return {name: (key, hint) for where, section in sections for name, key, hint in declarations(section, where)}


def section_with(name: str) -> str | None:
    """Return the first section that has a key of this name."""
    return next((key.partition(".")[0] for key in declared() if key.partition(".")[2] == name), None)
