"""Which kinds of values a key takes, for suggestions: read from the schema and our options' files, nothing composed."""

from __future__ import annotations

import re
import types
import typing
from typing import Any, Literal, Union

from ddpexp.config.declared import declared
from ddpexp.config.folders import conf_folder
from ddpexp.system.yaml_text import load_yaml

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_FEW = 1000  # numbers that a range may have to be suggested


def takes_number(key: str) -> bool:
    """Return whether a key is known to take a number."""
    return bool(_kinds(key) & {int, float})


def takes_fraction(key: str) -> bool:
    """Return whether a key is known to take a number that need not be whole."""
    return float in _kinds(key)


def takes_list(key: str) -> bool:
    """Return whether a key is known to take a list."""
    return bool(_kinds(key) & {list, tuple})


def takes_text(key: str) -> bool:
    """Return whether a key may take any text, as one does of which nothing is known."""
    kinds = _kinds(key)
    return str in kinds or not kinds


def several(value: object) -> str | None:
    """Return how a sweep's values are typed that somebody has written as one, such as `0.1:0.01` or `0..3`."""
    if isinstance(value, list | tuple):
        numbers = [str(item) for item in value]
        return ",".join(numbers) if len(numbers) > 1 and all(map(_NUMBER.fullmatch, numbers)) else None
    text = str(value).strip()
    if (ends := re.fullmatch(r"(\d+)(?:\.\.+|-)(\d+)", text)) is not None:
        first, last = int(ends[1]), int(ends[2])
        return f"range({first},{last + 1})" if 0 < last - first < _FEW else None
    inside = text[1:-1] if text[:1] + text[-1:] in ("[]", "{}", "()") else text
    numbers = [part for part in re.split(r"[\s,:;]+", inside) if part]
    return ",".join(numbers) if len(numbers) > 1 and all(map(_NUMBER.fullmatch, numbers)) else None


def _kinds(key: str) -> set[Any]:
    key = key.lstrip("+~")
    if key in declared():
        return _parts(declared()[key][1])
    section, _, rest = key.partition(".")
    values = [_at(path.read_text(), rest) for path in (conf_folder() / section).glob("*.yaml")] if rest else []
    return {type(value) for value in values if value is not None}


def _parts(hint: Any) -> set[Any]:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return {part for inner in typing.get_args(hint) for part in _parts(inner)}
    if origin is Literal:
        return {Literal}
    return {origin or hint} - {None, type(None)}


def _at(text: str, key: str) -> Any:
    value = load_yaml(text)
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value
