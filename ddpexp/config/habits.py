"""Overrides in the words of other frameworks, with what is typed here in their place: keys and values at once."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from ddpexp.config.declared import declared
from ddpexp.config.folders import our_options
from ddpexp.config.foreign import advice_on_value, counterpart, value_here
from ddpexp.config.suggestions import refusals


def answer(overrides: Iterable[str]) -> str:
    """Return a sentence with what is typed here in place of all overrides of other frameworks; empty if unknown."""
    overrides = list(overrides)
    typed = " ".join(dict.fromkeys(shlex.quote(here) for override in overrides for here in _typed(override)))
    return f"Did you mean {typed}?" if typed else " ".join(dict.fromkeys(filter(None, map(_advice, overrides))))


def _typed(override: str) -> Iterator[str]:
    """Yield the overrides that replace one of another framework; none for a key of ours, or another meaning."""
    key, _, value = override.lstrip("+").partition("=")
    ours = _key(key)
    if ours is None or (ours in declared() and declared()[ours][0].remark):
        return
    here = value_here(ours, value.lower())
    if key == ours and here is None:
        return
    known = our_options().get(ours, ())
    here = here or value
    if (here in known or not known or ours == "recipe") and not any(refusals(f"{ours}={here}")):
        yield f"{ours}={here}"


def _key(typed: str) -> str | None:
    """Return the key or group that is meant: itself, one of another name, or a group that is typed as a key."""
    last = typed.rpartition(".")[2]
    if typed in declared() or typed in our_options():
        return typed
    return counterpart(last) or (last if last in our_options() else None)


def _advice(override: str) -> str:
    key, _, value = override.lstrip("+").partition("=")
    return advice_on_value(_key(key) or key, value.lower())
