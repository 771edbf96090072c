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
    found = {match[1]: match[2] for word in overrides if (match := _TARGET.match(word))}
    return dict(sorted(found.items(), key=lambda item: item[0].count(".")))


def is_in(word: str, nodes: Iterable[str]) -> bool:
    """Return whether an override sets a key in one of the sections."""
    key = word.lstrip("+~").partition("=")[0]
    return any(key.startswith(f"{node}.") for node in nodes)


def forced(overrides: Sequence[str], nodes: Iterable[str]) -> list[str]:
    """Return the overrides with those forced that no file lists: keys of the new targets, and former keys."""
    return [
        f"++{word}" if word[:1] not in "+~" and (is_in(word, nodes) or is_former(word)) else word for word in overrides
    ]


def is_former(word: str) -> bool:
    """Return whether an override sets a key that no file has any more, but which still counts."""
    return word.partition("=")[0] == "logger.kind"


def keys_of_target(node: Any, name: str) -> list[str]:
    """Return the keys of a section that belong to its target, not to every kind of data."""
    general = {"_target_", *DATA_KEYS} - {"prepare"} if name == "data" else {"_target_"}
    return [str(key) for key in node if key not in general] if isinstance(node, DictConfig) else []
