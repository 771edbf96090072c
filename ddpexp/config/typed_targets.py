"""Overrides of a `_target_`, with which the other keys of its section belong to another class or function."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from omegaconf import DictConfig

from ddpexp.config.schema import DATA_KEYS

_TARGET = re.compile(r"\+{0,2}((?:task|model|data|optimizer|scheduler)(?:\.\w+)*)\._target_=(.*)")


def typed_targets(overrides: Sequence[str]) -> dict[str, str]:
    """Return the sections whose `_target_` is overridden, each with the new target; outer sections first."""
    targets = {match[1]: match[2] for override in overrides if (match := _TARGET.match(override))}
    return dict(sorted(targets.items(), key=lambda item: item[0].count(".")))


def is_in(override: str, nodes: Iterable[str]) -> bool:
    """Return whether an override sets a key in one of the sections."""
    key = override.lstrip("+~").partition("=")[0]
    return any(key.startswith(f"{node}.") for node in nodes)


def forced(overrides: Sequence[str], nodes: Iterable[str]) -> list[str]:
    """Return the overrides with those forced that no file lists: keys of the new targets, and former keys."""
    return [
        f"++{override}" if override[:1] not in "+~" and (is_in(override, nodes) or is_former(override)) else override
        for override in overrides
    ]


def is_former(override: str) -> bool:
    """Return whether an override sets a key that no file has any more, but which still counts."""
    return override.partition("=")[0] == "logger.kind"


def keys_of_target(node: Any, name: str) -> list[str]:
    """Return the keys of a section that belong to its target, not to every kind of data."""
    general = {"_target_", *DATA_KEYS} - {"prepare"} if name == "data" else {"_target_"}
    return [str(key) for key in node if key not in general] if isinstance(node, DictConfig) else []
