"""Whether what a suggestion tells the user to type would be accepted."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from ddpexp.config.build import convert
from ddpexp.config.declared import FIELDS
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.settings.key import annotations_of, declaration
from ddpexp.system.yaml_text import RANGE

_OVERRIDE = re.compile(
    r"(?<![\w./$+~-])[+~]{0,2}(?P<key>[a-z_]\w*(?:\.\w+)*)=(?P<value>\[[^\]]*\]|\{[^}]*\}|'[^']*'|\"[^\"]*\"|[^\s,;)`]*)"
)
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*|.*\.\.\.|.*[{<$].*|\w+\(.*")  # stands for a value of the user's, or a sweep


def drop_refused(error: DdpexpError) -> None:
    """Take the suggestion from an error, before it is shown, if ddpexp would refuse what it says to type."""
    if error.suggestion and any(refusals(error.suggestion)):
        error.suggestion = ""
    for further in error.further:
        drop_refused(further)


def refusals(suggestion: str) -> Iterator[str]:
    """Yield why the overrides in a suggestion would be refused; nothing if all are accepted.

    Checked are the keys, types and ranges of the sections that every run has, except for `data`; a placeholder such as
    DIR is accepted as a value.
    """
    for section, rest, value in overrides_in(suggestion):
        if section in FIELDS and section != "data" and rest:
            yield from _typed_refusals(f"{section}.{rest}", value)


def overrides_in(suggestion: str) -> Iterator[tuple[str, str, str]]:
    """Yield the section or group, the rest of the key and the value of each override in a text."""
    for match in _OVERRIDE.finditer(suggestion):
        section, _, rest = match["key"].partition(".")
        value = match["value"]
        yield section, rest, value if value.endswith("...") else value.rstrip(".:?!")


def _typed_refusals(key: str, value: str) -> Iterator[str]:
    section, *names = key.split(".")
    hint = _hint(FIELDS[section], names)
    if hint is None:
        yield f"{key} is not a key"
    elif value and not is_placeholder(value):
        try:
            convert(value if RANGE.fullmatch(value) else yaml.safe_load(value), hint, key)
        except RefusedError as error:
            yield str(error)
        except yaml.YAMLError:
            yield f"{key}={value} is not an override"


def is_placeholder(value: str) -> bool:
    """Return whether a value stands for one of the user's."""
    return _PLACEHOLDER.fullmatch(value.strip("[]'\"")) is not None


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
