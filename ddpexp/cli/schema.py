"""The verb `ddpexp schema`: a JSON schema with which editors complete and check YAML files."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union

from ddpexp.cli.keys import Catalogue
from ddpexp.cli.verb import Call
from ddpexp.config import strategies
from ddpexp.config.build import did_you_mean
from ddpexp.config.compose import overview
from ddpexp.config.declared import FIELDS
from ddpexp.config.folders import LISTED
from ddpexp.config.instantiate import Trust, locate
from ddpexp.config.registry import keys_of
from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.settings.key import Key, annotations_of, declaration
from ddpexp.settings.node import Node

Schema = dict[str, Any]

DRAFT = "http://json-schema.org/draft-07/schema#"  # a name, which nobody downloads; what editors read
_REFERENCE: Schema = {"type": "string", "pattern": r"\$\{"}  # to another key, in place of a value of any type
_SCALARS: Mapping[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_CALL: Schema = {"type": "object", "properties": {"_target_": {"type": "string"}}}
_DEFAULTS: Schema = {
    "type": "array",
    "description": "The options that this file chooses, such as - override /model: lenet.",
    "items": {"type": ["string", "object"]},
}
_LISTED_SECTION: Schema = {  # several parts, each below a key of its own
    "type": ["object", "null"],
    "additionalProperties": {"anyOf": [_CALL, {"type": ["string", "null"]}]},
}


def schema(call: Call) -> int:
    """Print the schema of a recipe, or of an option of the group that is named; return the exit code.

    Raises:
        RefusedError: there is no such group.
    """
    print(json.dumps(schema_of(call.operands), indent=1))
    return EXIT_DONE


def schema_of(operands: Sequence[str]) -> Schema:
    """Return the schema of a recipe, or of an option of the group that the operands name.

    Raises:
        RefusedError: there is no such group.
    """
    sections = dict(_sections())
    names = operands or ["recipe"]
    if len(names) > 1 or names[0] not in sections:
        raise RefusedError(
            f"There is no group {' '.join(names)}", key="schema", suggestion=did_you_mean(names[0], sections)
        )
    name = names[0]
    if name == "recipe":
        properties: Schema = {"defaults": _DEFAULTS, **sections, "hydra": {"type": "object"}}
        described: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    elif name in LISTED:
        described = {**_LISTED_SECTION, "properties": {"defaults": _DEFAULTS}}
    else:
        described = {**sections[name], "properties": {"defaults": _DEFAULTS, **sections[name]["properties"]}}
    return {"$schema": DRAFT, "title": f"ddpexp: {name}", **described}


def _sections() -> Iterator[tuple[str, Schema]]:
    """Yield the schema of each section, by its name."""
    catalogue = Catalogue(overview([], None))
    said = {key.name: key.meaning for section in catalogue.sections for key in catalogue.keys(section)}
    for name in catalogue.sections:
        about = {"description": catalogue.about(name)}
        if name == "data":
            kinds = [locate(key, Trust(), "data.prepare") for key in keys_of("data.prepare")]
            yield name, {**_called(_union(name, [FIELDS[name], *kinds], catalogue, said)), **about}
        elif name in FIELDS:
            yield name, {**_object(FIELDS[name], name, said), **about}
        elif name == "strategy":
            kinds = [strategies.options_of(kind) for kind in strategies.kinds()]
            yield name, {**_union(name, kinds, catalogue, said), **about, "additionalProperties": False}
        elif name in ("launcher", "scheduler"):
            kinds = [locate(key, Trust(), name) for key in keys_of(name)]
            yield name, {**_called(_union(name, kinds, catalogue, said)), **about}
        elif name in LISTED:
            yield name, {**_LISTED_SECTION, **about}
        else:
            yield name, {**_CALL, **about}


def _called(section: Schema) -> Schema:
    """Return the schema of a section that names what is called."""
    return {**section, "properties": {**_CALL["properties"], **section["properties"]}}


def _union(section: str, kinds: list[Any], catalogue: Catalogue, said: Mapping[str, str]) -> Schema:
    """Return the schema of a section whose keys are those of any of these classes and functions."""
    of_options = {
        key.name: key.meaning
        for option in catalogue.options(section)
        for key in catalogue.option(section, option).keys
    }  # fmt: skip
    alternatives: dict[str, list[Schema]] = {}
    for kind in kinds:
        for name, described in _object(kind, section, {**said, **of_options})["properties"].items():
            known = alternatives.setdefault(name, [])
            if described not in known:
                known.append(described)
    merged = {name: several[0] if len(several) == 1 else {"anyOf": several} for name, several in alternatives.items()}
    return {"type": "object", "properties": merged}


def _object(section: Any, where: str, said: Mapping[str, str]) -> Schema:
    """Return the schema of a section whose keys are the fields of a dataclass, or the arguments of a function."""
    hints = annotations_of(section)
    if dataclasses.is_dataclass(section):
        fields = [one for one in dataclasses.fields(section) if one.init]
        names = [one.name for one in fields if not one.metadata.get("rest")]
        has_rest = len(names) < len(fields)
    else:
        names, has_rest = [name for name in hints if name not in ("schema", "return")], False  # `schema` is for code
    properties = {name: _value(hints[name], f"{where}.{name}", said) for name in names}
    return {"type": "object", "properties": properties, "additionalProperties": has_rest}


def _value(hint: Any, name: str, said: Mapping[str, str]) -> Schema:
    """Return the schema of a key's value, with what the comments in conf say of the key."""
    key, plain = declaration(hint)
    alternatives = list(_alternatives(plain, key, name, said))
    if all(one.get("type") != "string" or "pattern" in one for one in alternatives) and {} not in alternatives:
        alternatives.append(_REFERENCE)
    described = alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}
    return {**described, "description": said[name]} if said.get(name) else described


def _alternatives(hint: Any, key: Key, name: str, said: Mapping[str, str]) -> Iterator[Schema]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _alternatives(argument, key, name, said)
    elif origin is Literal:
        yield {"enum": list(arguments)}
    elif origin is tuple:
        yield {"type": "array", "items": _value(arguments[0], name, {})}
    elif origin is Mapping:
        yield {"type": "object", "additionalProperties": _value(arguments[1], name, {})}
    elif hint is Node:
        yield {**_CALL, "required": ["_target_"]}
    elif dataclasses.is_dataclass(hint):
        yield _object(hint, name, said)
    elif hint in (int, float):
        yield {"type": _SCALARS[hint], **_range(key)}
    elif hint is str and key.pattern is not None:
        yield {"type": "string", "pattern": f"^(?:{key.pattern})$"}
    else:
        yield {"type": _SCALARS[hint]} if hint in _SCALARS else {}


def _range(key: Key) -> Schema:
    limits = {
        "exclusiveMinimum": key.above,
        "minimum": key.at_least,
        "exclusiveMaximum": key.below,
        "maximum": key.at_most,
    }
    return {name: limit for name, limit in limits.items() if limit is not None and limit != math.inf}
