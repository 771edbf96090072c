"""Texts on what runs differ in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpexp.config.keys import MISSING
from ddpexp.errors import shown
from ddpexp.run.differences import Value
from ddpexp.run.provenance import COMMIT, PATCH, without_inner


def spans(values: Sequence[Value]) -> str:
    """Return the values that a key had over the steps of a run, such as `0.1 -> 0.002 at 20`."""
    return " -> ".join(map(_since, values))


def _since(value: Value) -> str:
    about = "" if value.is_exact else "about "
    return f"{value_text(value.value)} at {about}{value.after:,}" if value.after else value_text(value.value)


def texts(group: str, keys: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Return a text for each key that differs."""
    if group == "code":
        return [_code_text(key, *values) for key, values in keys.items()]
    return [f"{key} {value_text(old)} -> {value_text(new)}" for key, (old, new) in without_inner(keys).items()]


def _code_text(key: str, old: Any, new: Any) -> str:
    if key == COMMIT:
        return f"{key} {value_text(old)} -> {value_text(new)}"
    if new is MISSING:
        return f"no {key}" if key == PATCH else f"{key} is gone"
    if old is MISSING:
        return key if key == PATCH else f"{key} is new"
    return f"other {key}" if key == PATCH else f"{key} has changed ({old} -> {new})"


def value_text(value: Any) -> str:
    """Return a value as it is typed."""
    return "not set" if value is MISSING else shown(value)
