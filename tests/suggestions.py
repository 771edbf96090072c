"""Whether what a suggestion tells the user to type is accepted: keys and types, and commands and options that ship."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import yaml

from ddpexp.cli import verbs
from ddpexp.config import suggestions
from ddpexp.config.declared import FIELDS
from ddpexp.config.folders import conf_folder, groups, options
from ddpexp.config.suggestions import is_placeholder, overrides_in
from ddpexp.settings.data import DATA_KEYS

_COMMAND = re.compile(r"python -m ddpexp ([a-z]+)\b(?![=./])|`ddpexp ([a-z]+)\b(?![=./])")
_OPEN = ("data", "launcher", "strategy")  # sections whose keys depend on the chosen option


def refusals(suggestion: str, shipped_only: bool = False) -> Iterator[str]:
    """Yield why a suggestion would be refused.

    `shipped_only`: neither packages nor the user's folders add options, so that the options
    of groups and the keys of data, launchers and strategies are checked too.
    """
    for match in _COMMAND.finditer(suggestion):
        if (name := match[1] or match[2]) not in verbs.NAMES:
            yield f"there is no command {name}"
    yield from suggestions.refusals(suggestion)
    for section, rest, value in overrides_in(suggestion) if shipped_only else ():
        if section not in FIELDS or section == "data" or not rest:
            yield from _shipped_refusals(section, rest, value)


def _shipped_refusals(section: str, rest: str, value: str) -> Iterator[str]:
    if not rest:
        known = section in groups([conf_folder()]) and value and not is_placeholder(value)
        if known and not set(value.strip("[]").split(",")) <= set(options(section, [conf_folder()])):
            yield f"{section} has no option {value}"
    elif rest and section in _OPEN and rest.rpartition(".")[2] not in _shipped_keys(section):
        yield f"no {section} has the key {rest}"


@cache
def _shipped_keys(section: str) -> frozenset[str]:
    """Return the keys that a section has with one of its shipped options, and those of its sections."""
    keys = {*DATA_KEYS} | _names(yaml.safe_load((conf_folder() / "config.yaml").read_text()).get(section))
    for path in (conf_folder() / section).glob("*.yaml"):
        keys |= _names(yaml.safe_load(path.read_text()))
    return frozenset(keys)


def _names(values: Any) -> set[str]:
    if not isinstance(values, Mapping):
        return set()
    return {str(key) for key in values}.union(*(_names(value) for value in values.values()))
