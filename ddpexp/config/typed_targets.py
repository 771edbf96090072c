"""Overrides of a `_target_`, with which the other keys of its section belong to another class or function."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from omegaconf import DictConfig

from ddpexp.config.registry import keys_of
from ddpexp.loggers.remote.base import Keys
from ddpexp.settings.data import DATA_KEYS

_TARGET = re.compile(r"\+{0,2}((?:task|model|data|optimizer|scheduler)(?:\.\w+)*)\._target_=(.*)")
_OF_REMOTE_LOGGERS = re.compile(rf"logger\.([\w-]+)\.(?:{'|'.join(Keys.__dataclass_fields__)})")


def typed_targets(overrides: Sequence[str]) -> dict[str, str]:
    """Return the sections whose `_target_` is overridden, each with the new target; outer sections first."""
    targets = {match[1]: match[2] for override in overrides if (match := _TARGET.match(override))}
    return dict(sorted(targets.items(), key=lambda item: item[0].count(".")))


def is_in(override: str, nodes: Iterable[str]) -> bool:
    """Return whether an override sets a key in one of the sections."""
    key = override.lstrip("+~").partition("=")[0]
    return any(key.startswith(f"{node}.") for node in nodes)


def forced(overrides: Sequence[str], nodes: Iterable[str]) -> list[str]:
    """Return the overrides with those forced that no file lists: keys of the new targets, and others that count."""
    return [
        f"++{override}"
        if override[:1] not in "+~" and (is_in(override, nodes) or counts_unlisted(override))
        else override
        for override in overrides
    ]


def counts_unlisted(override: str) -> bool:
    """Return whether an override sets a key that counts although no file lists it.

    That is one of every remote logger: whether the logger of a package is remote is known only where its class is
    imported.
    """
    of_logger = _OF_REMOTE_LOGGERS.fullmatch(override.partition("=")[0])
    return of_logger is not None and of_logger[1] not in keys_of("logger")


def keys_of_target(node: Any, name: str) -> list[str]:
    """Return the keys of a section that belong to its target, not to every kind of data."""
    general = {"_target_", *DATA_KEYS} - {"prepare"} if name == "data" else {"_target_"}
    return [str(key) for key in node if key not in general] if isinstance(node, DictConfig | dict) else []
