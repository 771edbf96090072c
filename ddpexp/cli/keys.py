"""Every key and option that can be typed: the default, what it may be, and what the comments in conf say of it."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ddpexp.config.build import literals, spoken
from ddpexp.config.comments import Comments, comments_of
from ddpexp.config.compose import Overview
from ddpexp.config.declared import FIELDS
from ddpexp.config.instantiate import Trust, locate
from ddpexp.config.registry import key_of
from ddpexp.config.strategies import options_of
from ddpexp.settings.key import annotations_of, declaration
from ddpexp.strategy.options import Options
from ddpexp.system.yaml_text import load_yaml

# What is typed first comes first.
ORDER = (
    "recipe", "trainer", "model", "data", "optimizer", "scheduler", "task", "run", "launcher", "strategy", "logger",
    "callbacks",
    "sweep",
)  # fmt: skip
_CALLED = ("launcher", "scheduler")  # sections whose class has typed fields and is free of torch
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_SECTION = "a section"
_GLOBAL = "_global_"  # Hydra's name for a package whose keys stand in the tree as they are written
_NONE = Comments("", {}, None)


@dataclass(frozen=True)
class KeyHelp:
    """A key, as it is typed."""

    name: str
    default: Any
    kind: str  # what its value may be, in words; empty where it may be anything
    values: tuple[str, ...]  # what can be typed for it, where that is known
    meaning: str  # empty where no comment says it

    @property
    def typed(self) -> str:
        """Return the key with its default, as it is typed."""
        return self.name if self.is_section else f"{self.name}={typed(self.default)}"

    @property
    def is_section(self) -> bool:
        """Return whether this is no key but the name of those below it."""
        return self.kind == _SECTION


@dataclass(frozen=True)
class OptionHelp:
    """An option of a group: a file."""

    group: str
    name: str
    about: str
    chooses: tuple[str, ...]  # options of other groups, as they are typed: what a recipe's list of defaults overrides
    keys: tuple[KeyHelp, ...]


class Catalogue:
    """What can be typed beside some overrides."""

    def __init__(self, overview: Overview) -> None:
        """Take what the overrides compose."""
        self._overview = overview
        self._said: dict[frozenset[tuple[str, str]], dict[str, str]] = {}
        self.values = overview.values

    @property
    def sections(self) -> list[str]:
        """Return the sections of the tree, what is typed first in front."""
        return sorted(self.values, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    @property
    def groups(self) -> list[str]:
        """Return the groups, in the same order."""
        found = {path.parent.name for folder in self._overview.folders for path in folder.glob("*/*.yaml")}
        return sorted(found, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))

    def chosen(self, group: str) -> str | None:
        """Return the option of a group that the overrides choose; of several each, with commas between them."""
        return self._overview.choices.get(group)

    def options(self, group: str) -> list[str]:
        """Return the options of a group."""
        return sorted({path.stem for folder in self._overview.folders for path in (folder / group).glob("*.yaml")})

    def keys(self, section: str) -> list[KeyHelp]:
        """Return the keys of a section as the overrides compose it, in the order of its files."""
        found = list(self._keys(section, self.values[section], self._overview.choices))
        return (
            [*found, *self._keys("hydra", self._overview.of_hydra, self._overview.choices)]
            if section == "sweep"
            else found
        )

    def about(self, section: str) -> str:
        """Return what the comments say of a section: of the option that was chosen for it, else of its name."""
        chosen = self.chosen(section)
        said = self._comments(section, chosen).about if chosen is not None else ""
        return said or self._in_tree(self._overview.choices).get(section, "")

    def option(self, group: str, name: str) -> OptionHelp:
        """Return an option of a group, with its keys and their defaults in the option's own file."""
        comments = self._comments(group, name)
        try:
            values = load_yaml(_text(self._file(group, name)))
        except (ValueError, yaml.YAMLError):
            values = None  # choosing it reports the error
        values = values if isinstance(values, dict) else {}
        keys: list[KeyHelp] = []
        for section, inner in _sections(_place(group, comments), values):
            keys += self._keys(section, inner, {**self._overview.choices, group: name})
        return OptionHelp(group, name, comments.about, tuple(_chosen(values.get("defaults"))), tuple(keys))

    def _keys(self, section: str, values: Any, choices: Mapping[str, str]) -> Iterator[KeyHelp]:
        said = self._in_tree(choices)
        hints = _hints(section, values) if isinstance(values, Mapping) else {}
        for name, value, hint in _entries(section, values, hints):
            meaning = said.get(name, "")
            if not isinstance(value, Mapping) or not value:
                yield KeyHelp(name, value, _kind(name, value, hint), _values(value, hint), meaning)
            elif meaning:
                yield KeyHelp(name, None, _SECTION, (), meaning)

    def _in_tree(self, choices: Mapping[str, str]) -> dict[str, str]:
        """Return what the comments say of each key.

        Those of its own group and of config.yaml first, then of recipes.
        """
        known = self._said.setdefault(frozenset(choices.items()), {})
        if known:
            return known
        of_options = {f"{group}={name}": self._comments(group, name) for group, name in choices.items()}
        for title, comments in of_options.items():
            if comments.package != _GLOBAL:
                place = _place(title.partition("=")[0], comments)
                known.update({f"{place}.{name}": text for name, text in comments.keys.items()})
        for name, text in _comments(self._overview.folders[0] / "config.yaml").keys.items():
            known.setdefault(name, text)
        for title, comments in of_options.items():
            for name, text in comments.keys.items() if comments.package == _GLOBAL else ():
                known[name] = f"{known[name]}\n{title}: {text}" if name in known else text
        return known

    def _comments(self, group: str, option: str) -> Comments:
        """Return the comments of an option's file, and of those in its folder that it is made of.

        Of several chosen options, as loggers can be, of each.
        """
        first, _, others = option.partition(",")
        if others:
            several = [self._comments(group, name) for name in (first, *others.split(","))]
            about = " ".join(comments.about for comments in several)
            return Comments(about, {key: text for one in several for key, text in one.keys.items()}, several[0].package)
        found = _comments(self._file(group, option))
        for base in _bases(self._file(group, option)):
            below = _comments(self._file(group, base))
            found = Comments(found.about, {**below.keys, **found.keys}, found.package)
        return found

    def _file(self, group: str, option: str) -> Path | None:
        paths = [folder / group.partition("@")[0] / f"{option}.yaml" for folder in self._overview.folders]
        return next((path for path in paths if path.is_file()), None)


def _place(group: str, comments: Comments) -> str:
    """Return where in the tree the keys of an option's file stand; empty for the top."""
    name, _, typed_place = group.partition("@")
    own = name.replace("/", ".")
    place = comments.package if comments.package is not None else typed_place or own
    return "" if place == _GLOBAL else place.replace("_group_", own)


def typed(value: Any) -> str:
    """Write a value as it is typed."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{typed(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(typed, value))}]"
    if value == "":
        return "''"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


@cache
def _text(path: Path | None) -> str:
    try:
        return path.read_text() if path is not None else ""
    except OSError:
        return ""


@cache
def _comments(path: Path | None) -> Comments:
    try:
        return comments_of(_text(path))
    except (ValueError, yaml.YAMLError):
        return _NONE  # choosing it reports the error


def _bases(path: Path | None) -> list[str]:
    """Return the files of the same folder that a file is made of.

    Those that its list of defaults names without a group.
    """
    try:
        values = load_yaml(_text(path)) if "defaults" in _text(path) else None
    except (ValueError, yaml.YAMLError):
        return []
    listed = values.get("defaults") if isinstance(values, dict) else None
    return [name for name in listed if isinstance(name, str) and name != "_self_"] if isinstance(listed, list) else []


def _chosen(defaults: Any) -> Iterator[str]:
    """Yield the options that a list of defaults chooses, as they are typed."""
    for entry in defaults if isinstance(defaults, list) else []:
        for group, option in entry.items() if isinstance(entry, dict) else ():
            yield f"{str(group).removeprefix('override ').removeprefix('optional ').lstrip('/')}={option}"


def _sections(place: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the sections of the tree in which the keys of a file stand, with the values there."""
    values = {str(key): value for key, value in values.items() if key != "defaults"}
    if place:
        top, *below = place.split(".")
        for name in reversed(below):
            values = {name: values}
        yield top, values
    else:
        yield from values.items()


def _entries(path: str, value: Any, hints: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key below a path, sections too, with its value and its type, where that is known."""
    if not isinstance(value, Mapping):
        yield path, value, None
        return
    for key, inner in value.items():
        hint, name = hints.get(str(key)), f"{path}.{key}"
        yield name, inner, hint
        if isinstance(inner, Mapping):
            _, hint = declaration(hint)
            is_section = isinstance(hint, type) and dataclasses.is_dataclass(hint)
            below = annotations_of(hint) if is_section else {}
            yield from _entries(name, inner, below)


def _hints(section: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the types of a section's keys, as far as they can be had without torch and without others' code."""
    if section == "strategy":
        return annotations_of(options_of(str(values.get("kind"))) or Options)
    common = annotations_of(FIELDS[section]) if section in FIELDS else {}
    if section == "data":
        return {**_of_callable(values.get("prepare"), "data.prepare"), **common}
    return _of_callable(values.get("_target_"), section) if section in _CALLED else common


def _of_callable(target: Any, where: str) -> Mapping[str, Any]:
    if key_of(where, target) is None:
        return {}
    try:
        part = locate(target, Trust(), where)
        called = inspect.getattr_static(part, "__init__") if isinstance(part, type) else part
        return annotations_of(called)
    except Exception:  # it is refused where it is used
        return {}


def _kind(name: str, default: Any, hint: Any) -> str:
    """Say what a value may be: by its type, else by its default, as a composition holds it against that."""
    if hint is not None and hint is not Any:
        key, hint = declaration(hint)
        return key.usage(hint) if key.is_range else spoken(hint)
    if name.endswith("._target_"):
        return "a class or a function"
    if isinstance(default, bool):
        return "true or false"
    if isinstance(default, int):
        return "a whole number"
    if isinstance(default, float) or (isinstance(default, str) and _NUMBER.fullmatch(default)):
        return "a number"
    return "a list" if isinstance(default, list | tuple) else ""


def _values(default: Any, hint: Any) -> tuple[str, ...]:
    _, hint = declaration(hint)
    values = [typed(value) for value in literals(hint)]
    if typing.get_origin(hint) is tuple:
        return tuple(f"[{value}]" for value in values)
    if bool in (hint, *typing.get_args(hint)) or (hint is None and isinstance(default, bool)):
        values += ["true", "false"]
    if type(None) in typing.get_args(hint):
        values.append("null")
    return tuple(values)


def nearest(name: str, keys: Sequence[KeyHelp]) -> list[KeyHelp]:
    """Return the keys that a name means: itself, those below it, or those that end like it."""
    exact = [key for key in keys if key.name == name or key.name.startswith(f"{name}.")]
    return exact or [key for key in keys if key.name.endswith(f".{name}")]
