"""Whether what a suggestion tells the user to type would be accepted."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import yaml

from ddpexp.config.build import convert
from ddpexp.config.declared import SECTIONS
from ddpexp.config.folders import conf_folder, groups, options
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.settings.data import DATA_KEYS
from ddpexp.settings.key import annotations_of, declaration

_OVERRIDE = re.compile(
    r"(?<![\w./$+~-])[+~]{0,2}(?P<key>[a-z_]\w*(?:\.\w+)*)=(?P<value>\[[^\]]*\]|\{[^}]*\}|'[^']*'|\"[^\"]*\"|[^\s,;)`]*)"
)
_COMMAND = re.compile(r"python -m ddpexp ([a-z]+)\b(?![=./])|`ddpexp ([a-z]+)\b(?![=./])")
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*|.*\.\.\.|.*[{<$].*|\w+\(.*")  # stands for a value of the user's, or a sweep
_OPEN = ("data", "launcher", "strategy")  # sections whose keys depend on the chosen option


def drop_refused(error: DdpexpError) -> None:
    """Take the suggestion from an error, before it is shown, if ddpexp would refuse what it says to type."""
    if error.suggestion and any(refusals(error.suggestion)):
        error.suggestion = ""


def refusals(suggestion: str, shipped_only: bool = False, commands: Collection[str] | None = None) -> Iterator[str]:
    """Yield why the overrides and commands in a suggestion would be refused; nothing if all are accepted.

    Checked are the keys, types and ranges of the sections that every run has, except for `data`; a placeholder such as
    DIR is accepted as a value. `shipped_only`: neither packages nor the user's folders add options, so that the options
    of groups and the keys of data, launchers and strategies are checked too. `commands`: the names that there are.
    """
    for match in _COMMAND.finditer(suggestion):
        if commands is not None and (name := match[1] or match[2]) not in commands:
            yield f"there is no command {name}"
    for match in _OVERRIDE.finditer(suggestion):
        key, value = match["key"], match["value"]
        value = value if value.endswith("...") else value.rstrip(".:?!")
        section, _, rest = key.partition(".")
        if section in SECTIONS and section != "data" and rest:
            yield from _typed_refusals(key, value)
        elif shipped_only:
            yield from _shipped_refusals(section, rest, value)


def _typed_refusals(key: str, value: str) -> Iterator[str]:
    section, *names = key.split(".")
    hint = _hint(SECTIONS[section], names)
    if hint is None:
        yield f"{key} is not a key"
    elif value and not _is_placeholder(value):
        try:
            convert(yaml.safe_load(value), hint, key)
        except RefusedError as error:
            yield str(error)
        except yaml.YAMLError:
            yield f"{key}={value} is not an override"


def _shipped_refusals(section: str, rest: str, value: str) -> Iterator[str]:
    if not rest:
        known = section in groups([conf_folder()]) and value and not _is_placeholder(value)
        if known and not set(value.strip("[]").split(",")) <= set(options(section, [conf_folder()])):
            yield f"{section} has no option {value}"
    elif rest and section in _OPEN and rest.rpartition(".")[2] not in _shipped_keys(section):
        yield f"no {section} has the key {rest}"


def _is_placeholder(value: str) -> bool:
    return _PLACEHOLDER.fullmatch(value.strip("[]'\"")) is not None


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


def _hint(section: Any, names: Sequence[str]) -> Any:
    """Return the type of a key in a section; None if it has no such key."""
    hint = section
    for name in names:
        _, plain = declaration(hint)
        classes = [part for part in (plain, *typing.get_args(plain)) if dataclasses.is_dataclass(part)]
        if not classes:
            return None
        hint = annotations_of(classes[0]).get(name)
    return hint
