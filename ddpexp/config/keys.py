"""Dotted keys: of an override, and of a value in a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MISSING = object()
"""The value of a key that is not there."""


def override_key(override: str) -> str:
    """Return the key of an override, such as `model.hidden` of `+model.hidden=8`."""
    return override.lstrip("+~").partition("=")[0]


def value_at(tree: Any, key: str, default: Any = None) -> Any:
    """Return the value of a key such as `trainer.seed`."""
    for name in key.split("."):
        tree = tree.get(name, default) if isinstance(tree, Mapping) else default
    return tree
