"""The sections of a configuration, and the declaration, type and default of each key."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple, Union

from ddpexp.config.folders import conf_folder
from ddpexp.config.keys import MISSING, value_at
from ddpexp.config.registry import keys_of
from ddpexp.config.strategies import options_of
from ddpexp.settings.data import CommonData
from ddpexp.settings.key import Key, declarations
from ddpexp.settings.run import Predict, Recipe, RunSettings, SweepSettings
from ddpexp.settings.trainer import Trainer
from ddpexp.system.yaml_text import load_yaml


class Section(NamedTuple):
    """A section of a configuration."""

    fields: type | None = None  # the class with its keys; for `data`, the keys that every kind of data has
    target: str = ""  # the key that names its class or function, or the one of each part that it lists
    is_group: bool = False  # whether its options are files in conf
    reads_facts: bool = False  # whether it is built after the data is prepared, and may refer to facts of the data


SECTIONS: Mapping[str, Section] = {
    "recipe": Section(Recipe),
    "trainer": Section(Trainer),
    "task": Section(target="_target_", reads_facts=True),
    "model": Section(target="_target_", is_group=True, reads_facts=True),
    "data": Section(CommonData, target="_target_", is_group=True),
    "optimizer": Section(target="_target_", is_group=True),
    "scheduler": Section(target="_target_", is_group=True),
    "strategy": Section(target="kind", is_group=True),
    "launcher": Section(target="_target_", is_group=True),
    "logger": Section(target="_target_", is_group=True),
    "callbacks": Section(target="_target_", is_group=True, reads_facts=True),
    "run": Section(RunSettings),
    "predict": Section(Predict),
    "sweep": Section(SweepSettings),
}
FIELDS: Mapping[str, type] = {name: section.fields for name, section in SECTIONS.items() if section.fields}


@cache
def declared() -> Mapping[str, tuple[Key, Any]]:
    """Return the declaration and the type of each key, by its dotted name.

    The keys of all shipped strategies are declared. A section with a `_target_` has no declared keys.
    """
    strategies = [options for kind in keys_of("strategy") if (options := options_of(kind)) is not None]
    sections = [*FIELDS.items(), *(("strategy", options) for options in strategies)]
    return {name: (key, hint) for where, section in sections for name, key, hint in declarations(section, where)}


def section_with(name: str) -> str | None:
    """Return the first section that has a key of this name."""
    return next((key.partition(".")[0] for key in declared() if key.partition(".")[2] == name), None)


@cache
def _defaults() -> Mapping[str, Any]:
    values = load_yaml((conf_folder() / "config.yaml").read_text())
    return {**values, "trainer": load_yaml((conf_folder() / "trainer/default.yaml").read_text())}


def default_of(key: str) -> Any:
    """Return the default in conf of a key that every run has, such as `trainer.seed`; `MISSING` for another one."""
    return value_at(_defaults(), key, MISSING)


def takes_number(key: str) -> bool:
    """Return whether a key is known to take a number."""
    return bool(_types_of(key) & {int, float})


def takes_fraction(key: str) -> bool:
    """Return whether a key is known to take a number that need not be whole."""
    return float in _types_of(key)


def takes_list(key: str) -> bool:
    """Return whether a key is known to take a list."""
    return bool(_types_of(key) & {list, tuple})


def takes_text(key: str) -> bool:
    """Return whether a key may take any text, as may one of which nothing is known."""
    known = _types_of(key)
    return str in known or not known


def _types_of(key: str) -> set[Any]:
    """Return the types of values that a key takes: as declared, else the types of the values in the shipped files."""
    key = key.lstrip("+~")
    if key in declared():
        return _types_in(declared()[key][1])
    section, _, rest = key.partition(".")
    files = (conf_folder() / section).glob("*.yaml") if rest else ()
    return {type(value_at(load_yaml(path.read_text()), rest)) for path in files} - {type(None)}


def _types_in(hint: Any) -> set[Any]:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return {part for inner in typing.get_args(hint) for part in _types_in(inner)}
    return {origin or hint} - {type(None)}
