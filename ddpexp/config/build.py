"""From plain mappings to frozen dataclasses: types checked, every error with the key as typed on the command line."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union

from ddpexp.errors import RefusedError

T = TypeVar("T")


def build(cls: type[T], values: Any, where: str) -> T:
    """Make the frozen dataclass `cls` from the mapping `values` that stands at the key `where`.

    Raises:
        RefusedError: an unknown key (with the nearest known one), a missing key or a value of another type.
    """
    if not isinstance(values, Mapping):
        raise RefusedError(f"{where}={values} is not a section: it has the keys {_listed(_names(cls))}.")
    names = _names(cls)
    for key in values:
        if key not in names:
            raise RefusedError(f"{where}.{key} is not a known key.{did_you_mean(str(key), names, where + '.')}")
    hints = typing.get_type_hints(cls)
    built: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        key = f"{where}.{field.name}"
        if field.name in values:
            built[field.name] = convert(values[field.name], hints[field.name], key)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RefusedError(f"{key} is missing: give it a value, for example in the recipe or as {key}=... .")
    return cls(**built)


def did_you_mean(word: str, known: Iterable[str], prefix: str = "", suffix: str = "") -> str:
    """Say which known word is nearest, or list all when none is near; `prefix` and `suffix` make it what to type."""
    known = [name for name in known if not name.startswith("_")]
    near = difflib.get_close_matches(word.lower(), [name.lower() for name in known], n=1, cutoff=0.55)
    if near:
        best = next(name for name in known if name.lower() == near[0])
        return f" Did you mean {prefix}{best}{suffix}?"
    return f" Known here: {_listed(known)}."


def _names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words) or "nothing"


def convert(value: Any, hint: Any, key: str) -> Any:
    """Return `value` as the annotated type `hint`; a whole number may stand for a float, a list for a tuple.

    Raises:
        RefusedError: another type or a word outside the choices, with the nearest choice.
    """
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return _one_of(value, typing.get_args(hint), key)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return build(hint, value, key)
    if origin is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(convert(item, typing.get_args(hint)[0], key) for item in value)
        raise _wrong(value, hint, key)
    if origin is Literal:
        if value in typing.get_args(hint) and not isinstance(value, bool):
            return value
        raise _wrong(value, hint, key)
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, origin or hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise _wrong(value, hint, key)


def _one_of(value: Any, hints: tuple[Any, ...], key: str) -> Any:
    for hint in hints:
        try:
            return convert(value, hint, key)
        except RefusedError:
            continue
    raise _wrong(value, Union[hints], key)  # noqa: UP007


def shown(value: Any) -> str:
    """Write a value as it is typed."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _wrong(value: Any, hint: Any, key: str) -> RefusedError:
    words = [word for word in _literals(hint) if isinstance(word, str)]
    near = difflib.get_close_matches(shown(value).lower(), words, n=1, cutoff=0.6)
    meant = f" Did you mean {key}={near[0]}?" if near else ""
    return RefusedError(f"{key}={shown(value)} is not {_spoken(hint)}.{meant}")


def _literals(hint: Any) -> list[Any]:
    if typing.get_origin(hint) is Literal:
        return list(typing.get_args(hint))
    return [word for part in typing.get_args(hint) for word in _literals(part)]


_SPOKEN = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}


def _spoken(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_spoken(part) for part in typing.get_args(hint))
    if origin is Literal:
        words = [str(word) for word in typing.get_args(hint)]
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if origin is tuple:
        return f"a list, each item {_spoken(typing.get_args(hint)[0])}"
    return _SPOKEN.get(hint, getattr(hint, "__name__", str(hint)))
