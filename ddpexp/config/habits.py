"""Overrides in the words of other frameworks, with what is typed here in their place: keys and values at once."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from ddpexp.config.declared import declared
from ddpexp.config.folders import our_options
from ddpexp.config.foreign import advice_on_key, advice_on_value, counterpart, value_here
from ddpexp.config.suggestions import refusals

_OPTIONS = {  # for which a key stands here
    **dict.fromkeys(("trainer=gpu", "trainer=cuda"), "trainer.device=cuda"),
    "trainer=cpu": "trainer.device=cpu",
}


def answer(overrides: Iterable[str]) -> str:
    """Return a sentence with what is typed here in place of all overrides of other frameworks; empty if unknown."""
    typed = {override: list(map(shlex.quote, _typed(override))) for override in overrides}
    words = " ".join(dict.fromkeys(here for replaced in typed.values() for here in replaced))
    advice = dict.fromkeys(_advice(override) for override, replaced in typed.items() if not replaced)
    return " ".join(filter(None, [f"Did you mean {words}?" if words else "", *advice]))


def _typed(override: str) -> Iterator[str]:
    """Yield the overrides that replace one of another framework; none for a key of ours, or another meaning."""
    if override in _OPTIONS:
        yield _OPTIONS[override]
        return
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
    ours = _key(key)
    if ours is None and key.rpartition(".")[0] in ("", "trainer"):
        return advice_on_key(key)
    return advice_on_value(ours or key, value.lower())
