"""The defaults of keys, which stand in `conf` alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from ddpexp.config.folders import conf_folder
from ddpexp.system.yaml_text import load_yaml

MISSING = object()
"""The value of a key without a default."""


@cache
def _defaults() -> Mapping[str, Any]:
    values = load_yaml((conf_folder() / "config.yaml").read_text())
    return {**values, "trainer": load_yaml((conf_folder() / "trainer/default.yaml").read_text())}


def default_of(key: str) -> Any:
    """Return the default of a key that every run has, such as `trainer.seed`; `MISSING` for another one."""
    value: Any = _defaults()
    for name in key.split("."):
        value = value.get(name, MISSING) if isinstance(value, Mapping) else MISSING
    return value
