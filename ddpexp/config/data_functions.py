"""How the functions of the section `data` are called, `load` and `prepare` of a recipe, and what `prepare` returns.

The contract that a user reads is in docs/data.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ddpexp.errors import RefusedError

_PLAIN = (str, int, float, bool, type(None))
_MOST = 40  # entries of a list that are looked at


def check_takes_keys(function: Callable[..., Any], keys: Mapping[str, Any], key: str, target: str) -> None:
    """Check that a function can be called with each key of the section by its name; `key` says whose `target` it is.

    Raises:
        RefusedError: it cannot; with the definition that can.
    """
    parameters = _parameters(function)
    if parameters is None or _fits(function, (), keys):
        return
    name, listed = target.rpartition(".")[2], ", ".join(keys)
    needed = [one.name for one in parameters.values() if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    missing, unknown = [one for one in needed if one not in keys], [one for one in keys if one not in parameters]
    called = f"is called with each key of its section by its name: {name}({', '.join(f'{one}=...' for one in keys)})"
    section = key.rpartition(".")[0]
    if len(missing) == 1 and len(unknown) == len(keys):
        hint = f"Write def {name}({listed}), without the argument {missing[0]}."
        if key.endswith("._target_"):
            hint = f"{hint} Only with {section}.prepare there is one argument, the mapping that this returns."
    elif missing:
        hint = f"Give {', '.join(f'{section}.{one}' for one in missing)} a value, or the argument a default."
    else:
        hint = (
            f"Write def {name}({listed}), or leave a key out with {' '.join(f'~{section}.{one}' for one in unknown)}."
        )
    raise RefusedError(called, key=key, value=target, suggestion=hint)


def check_takes_description(function: Callable[..., Any], keys: Mapping[str, Any], prepare: str, target: str) -> None:
    """Check that a function can be called with what `prepare` has returned, which is a mapping.

    Raises:
        RefusedError: it cannot, or its argument is called like a key of the section; with the definition that can.
    """
    parameters = _parameters(function)
    if parameters is None:
        return
    only = next(iter(parameters), None)
    if _fits(function, ({},), {}) and only not in keys:
        return
    name = target.rpartition(".")[2]
    raise RefusedError(
        f"is called with one argument, the mapping that data.prepare={prepare} returns, not with keys of the section",
        key="data._target_",
        value=target,
        suggestion=f"Write def {name}(prepared), and have {prepare} return what it needs.",
    )


def check_description(returned: Any, target: str) -> Mapping[str, Any]:
    """Return what a user's `data.prepare` has returned, once it can be sent to the workers.

    Raises:
        RefusedError: it is no mapping with a name, or holds what JSON does not.
    """
    if not isinstance(returned, Mapping) or not isinstance(returned.get("name"), str):
        kind = f"a mapping without a name, {returned!r}" if isinstance(returned, Mapping) else _kind(returned)
        sets = " The data sets themselves are what data._target_ returns." if hasattr(returned, "evals") else ""
        raise RefusedError(
            f"returned {kind}, and not the mapping that describes the data",
            key="data.prepare",
            value=target,
            suggestion="Return at least a name and a hash, such as {'name': 'pets', 'hash': hash_of_the_files}, beside "
            f"what data._target_ needs.{sets}",
        )
    if not isinstance(returned.get("facts", {}), Mapping):
        raise RefusedError(
            f"must return its `facts` as a mapping, such as {{'num_classes': 10}}, not {returned['facts']!r}",
            key="data.prepare",
            value=target,
        )
    if (found := _no_json(returned, "")) is not None:
        place, value = found
        raise RefusedError(
            f"returned a mapping in which {place} is {_kind(value)}: it is passed to the workers as JSON",
            key="data.prepare",
            value=target,
            suggestion="Return texts, numbers, lists, and mappings whose keys are texts, such as str(path), int(count) "
            "or tensor.tolist(); large data belongs in a file, of which the mapping has the path.",
        )
    return returned


class Description(dict[str, Any]):
    """What `data.prepare` has returned, for a user's function: a key that is missing is named with those there are."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(f"{key!r} is not in what data.prepare has returned, which has {', '.join(self)}")


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature: the call itself will tell
        return None


def _fits(function: Callable[..., Any], arguments: tuple[Any, ...], keys: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(*arguments, **keys)
    except TypeError:
        return False
    return True


def _no_json(value: Any, place: str) -> tuple[str, Any] | None:
    """Return the first place in a value that JSON cannot hold, and what is there."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            here = f"{place}.{key}" if place else str(key)
            if not isinstance(key, str):
                return f"the key {key!r}", key
            if (found := _no_json(inner, here)) is not None:
                return found
        return None
    if isinstance(value, list | tuple):
        found_inside = (_no_json(inner, f"{place}[{number}]") for number, inner in enumerate(value[:_MOST]))
        return next((found for found in found_inside if found is not None), None)
    return None if isinstance(value, _PLAIN) else (place, value)


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
