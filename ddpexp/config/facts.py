"""Facts of the data in a configuration: `${facts:num_classes}` stands for what the data's preparation returns.

Composing leaves such references as they are. They are resolved once, when the data is prepared and before any worker
starts, and config.yaml holds the values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ddpexp.config.build import did_you_mean
from ddpexp.config.declared import SECTIONS
from ddpexp.errors import RefusedError

_READERS = [name for name, section in SECTIONS.items() if section.reads_facts]
_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
_REFERENCE = re.compile(rf"\$\{{facts:({_NAME.pattern})\}}")


def reference(*names: object) -> str:
    """Return the reference itself: the resolver of `facts` while a configuration is composed.

    Raises:
        ValueError: it names no fact.
    """
    name = ",".join(map(str, names))
    if not _NAME.fullmatch(name):
        raise ValueError(f"${{facts:{name}}} names no fact of the data: write for example ${{facts:num_classes}}")
    return f"${{facts:{name}}}"


def refers(value: object) -> bool:
    """Return whether a value or a text refers to a fact."""
    return isinstance(value, str) and "${facts:" in value and _REFERENCE.search(value) is not None


def without_references(text: str) -> str:
    """Return the text without its references to facts."""
    return _REFERENCE.sub("", text)


def check(values: Mapping[str, Any]) -> None:
    """Check that only sections that are read after the preparation refer to facts, and that there is a preparation.

    Raises:
        RefusedError: another section does, or nothing prepares the data.
    """
    data = values.get("data")
    prepares = isinstance(data, Mapping) and (data.get("prepare") is not None or "_target_" not in data)
    for key, text in referring(values):
        section = key.partition(".")[0]
        if section == "data":
            raise RefusedError(
                "The facts come from the data's preparation", key=key, value=text, suggestion="Write the value itself."
            )
        if section not in _READERS:
            raise RefusedError(
                f"The section {section} is checked before the data is prepared, so it cannot refer to facts of the "
                f"data, as {', '.join(_READERS[:-1])} and {_READERS[-1]} can",
                key=key,
                value=text,
                suggestion="Write the value itself.",
            )
        if not prepares:
            raise RefusedError(
                "The facts of the data come from its preparation, and data.prepare is not set",
                key=key,
                value=text,
                suggestion="Name a function that returns them, for example {'name': 'pets', 'facts': "
                "{'num_classes': 37}}, or write the value itself.",
            )


def used(values: Mapping[str, Any], facts: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the facts that a configuration refers to; `where` is what returned the facts.

    Raises:
        RefusedError: a fact that is not there.
    """
    found: dict[str, Any] = {}
    for key, text in referring(values):
        for reference in _REFERENCE.finditer(text):
            name = reference[1].partition(".")[0]
            if name not in facts:
                near = did_you_mean(name, facts, "${facts:", "}") if facts else ""
                known = f"the facts {', '.join(sorted(facts))}" if facts else "no facts"
                raise RefusedError(
                    f"There is no fact {name}: {where} returns {known}", key=key, value=text, suggestion=near
                )
            _value(facts, reference[1], f"{key}={text}")
            found[name] = facts[name]
    return found


def check_model(values: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Check that a model with a vocabulary and a length of its own has room for the tokens of the data.

    Raises:
        RefusedError: it has not.
    """
    model = values.get("model")
    for key, what in (("vocab_size", "different tokens"), ("block_size", "tokens in a sample")):
        room, needed = (model or {}).get(key), facts.get(key)
        if isinstance(room, int) and isinstance(needed, int) and room < needed:
            other = f"data.block_size={room}" if key == "block_size" else "another data.tokenizer"
            raise RefusedError(
                f"is too small, as the data has {needed:,} {what}",
                key=f"model.{key}",
                value=room,
                suggestion=f"Use model.{key}={needed} or more, or {other}.",
            )


def resolve(values: Any, facts: Mapping[str, Any]) -> Any:
    """Return the values with the facts in place of the references; what is not there stays a reference."""
    if isinstance(values, Mapping):
        return {key: resolve(inner, facts) for key, inner in values.items()}
    if isinstance(values, list | tuple):
        return [resolve(inner, facts) for inner in values]
    if not refers(values):
        return values
    if (whole := _REFERENCE.fullmatch(values)) is not None:
        return _value(facts, whole[1], values) if whole[1].partition(".")[0] in facts else values
    joined = _REFERENCE.sub(lambda found: str(resolve(found[0], facts)), values)
    if "${" in without_references(joined):
        raise RefusedError(
            "A fact of the data cannot be part of another reference", suggestion="Write the value itself.", place=values
        )
    return joined


def _value(facts: Mapping[str, Any], path: str, where: str) -> Any:
    """Return a fact, or an item of one: `shape.0` is the first of shape."""
    name, *items = path.split(".")
    value = facts[name]
    for item in items:
        try:
            value = value[int(item)] if isinstance(value, list | tuple) else value[item]
        except (LookupError, TypeError, ValueError):
            raise RefusedError(f"The fact {name} is {facts[name]!r}, which has no {item}", key=where) from None
    if "${" in str(value):  # it would be resolved with the configuration
        raise RefusedError(f"The fact {name} is {value!r}, and a fact cannot hold a reference", key=where)
    return value


def referring(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys and values that refer to facts."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from referring(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from referring(inner, f"{key}[{index}]")
    elif refers(value):
        yield key, value
