"""The settings of a run directory that count only where the reader restates or trusts them.

Anybody may have made a run directory. With an address in its config.yaml, or a name on a hub, the reader's machine
would connect to a place of the author's choice; a reference to the environment (`${oc.env:NAME}`) would take a secret
there. This module decides for all sections and all kinds of parts which settings those are.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from ddpexp.config import trusted
from ddpexp.config.declared import FIELDS
from ddpexp.config.facts import refers
from ddpexp.config.instantiate import RECIPES, TORCH, Trust, locate
from ddpexp.config.plugins import plugin_folders
from ddpexp.config.registry import is_remote_logger, key_of
from ddpexp.data.hf.prepare import is_on_hub
from ddpexp.data.text.tokenizer import is_on_hub as is_tokenizer_on_hub
from ddpexp.errors import RefusedError
from ddpexp.loggers.remote.base import Keys
from ddpexp.system.yaml_text import load_yaml

Place = tuple[str | int, ...]  # the names and positions that lead to a value: ("data", "path", 0)

_CLEAN = re.compile(r"([a-z][a-z0-9+.-]*://[\w.\[\]:-]+)(/[^\s\"'<>|\\?#%]*)?", re.ASCII)  # an address; its origin
_HOST = re.compile(  # in letters or numbers, with a port; without one in the four numbers of IP version 4
    r"(.*@)?((?=[^:]*[a-z])[\w-]+(\.[\w-]+)*\.?|\d+(\.\d+)+|\d{8,}|\[[\da-f:.]+\]):\d{2,5}(/.*)?|\d+(\.\d+){3}(/.*)?",
    re.IGNORECASE | re.ASCII,
)
_DEVICE = re.compile(r"(cpu|cuda|hpu|meta|mps|npu|xla|xpu):\d+")
_RESOLVER = re.compile(r"\$\{((?!facts:)[\w.]+:\s*\w*)")
_VARIABLE = re.compile(r"\$\{(oc\.env:[A-Za-z_]\w*)\}")
_RESOLVED = re.compile(r"\$\{[\w.]+:[^${}]*\}")  # by a resolver, of a text
_REFERENCE = re.compile(r"\$\{[\w.]+\}")  # to another value, which is looked at itself
_HUB: Mapping[str, Mapping[str, Callable[[str], bool]]] = {  # by kind of data
    "hf": {"path": is_on_hub, "eval_path": is_on_hub, "tokenizer": is_tokenizer_on_hub},
    "text": {"tokenizer": is_tokenizer_on_hub},
}
HUB = ("hf-hub:", "hf_hub:")
"""timm's prefixes of models on a hub."""
_PRETRAINED = "pretrained_model_name_or_path"
_OF_EVERY_LOGGER = (*Keys.__dataclass_fields__, "_target_")


@dataclass(frozen=True)
class Setting:
    """A setting that has to be restated."""

    key: str  # as it is typed
    value: Any  # as config.yaml has it, with its references
    what: str  # such as `an address`
    trusts: tuple[str, ...] = ()  # the names that `ddpexp trust` takes for it; none: it can only be restated

    @property
    def override(self) -> str:
        """Return the override that restates it."""
        return f"{self.key}={_written(self.value)}"


class UnrestatedError(RefusedError):
    """A run directory has settings that the reader has neither restated nor trusted."""

    def __init__(self, name: str, settings: Sequence[Setting]) -> None:
        """Take the name of the directory or its file for the message."""
        self.name, self.settings = name, settings
        first = settings[0]
        super().__init__(
            f"has {first.override} ({first.what}), which counts only when it is restated: anybody may have written it",
            suggestion=self.advice(" ".join(self.overrides)),
            place=name,
        )
        self.args = (name, settings)

    def advice(self, again: str) -> str:
        """Return the suggestion; `again` is what restates them."""
        trust = f"trust it for all commands (ddpexp trust {' '.join(self.trusts)}), or " if self.trusts else ""
        return f"If it is yours, {trust}restate it: {again}"

    @property
    def overrides(self) -> list[str]:
        """Return the overrides that restate all of them."""
        return [setting.override for setting in self.settings]

    @property
    def trusts(self) -> list[str]:
        """Return the names that trust all of them; empty if one can only be restated."""
        every = all(setting.trusts for setting in self.settings)
        return list(dict.fromkeys(name for setting in self.settings for name in setting.trusts)) if every else []


@dataclass(frozen=True)
class Grants:
    """What a person who opens a run directory has restated, and whom the person trusts."""

    typed: frozenset[Place]  # keys of this command, and those that are as the reader's own files have them
    names: Sequence[str]  # run.trust=[...] of this command, and those of `ddpexp trust`

    @classmethod
    def of(
        cls,
        overrides: Sequence[str] = (),
        written: Mapping[str, Any] = MappingProxyType({}),
        folder: Path | None = None,
        without: Collection[str] = (),
    ) -> Grants:
        """Take the overrides of this command, the configuration as it is written, and the --config-dir.

        The keys in `without` choose options. A text with a reference to another key, which may be anybody's, is not
        the reader's.

        Raises:
            RefusedError: a name in run.trust or in the list of `ddpexp trust` is of no kind.
        """
        own = _own_settings([*plugin_folders(), *([folder] if folder is not None else [])])
        places = {place for place, value in leaves(written) if isinstance(value, str) and (place, value) in own}
        names = trusted.settings()
        for override in overrides:
            key, _, value = override.lstrip("+~").partition("=")
            if key == "run.trust":
                named = [name.strip(" '\"") for name in value.strip("[]").split(",")]
                names += [checked_setting(name, "run.trust") for name in named if ":" in name]
            elif key not in without and _is_closed(value):
                places.add(tuple(key.split(".")))
        return cls(frozenset(places), names)

    def also(self, places: Collection[Place]) -> Grants:
        """Return these grants with more restated keys."""
        return replace(self, typed=self.typed | frozenset(places))

    def restates(self, place: Place) -> bool:
        """Return whether the key, or a section or list around it, is typed."""
        return any(place[:end] in self.typed for end in range(1, len(place) + 1))

    def trusts(self, name: str) -> bool:
        """Return whether an address (with all below it), `hub:NAME` or `oc.env:NAME` is trusted."""
        if ".." in name or ("://" in name and _CLEAN.fullmatch(name) is None):
            return False  # what it leads to is for libraries to say
        return any(name == known or name.startswith(f"{known.rstrip('/')}/") for known in self.names if ":" in known)

    def trusts_all_of(self, written: object) -> bool:
        """Return whether a value, as it is written, is nothing but a trusted variable of the environment."""
        match = _VARIABLE.fullmatch(written) if isinstance(written, str) else None
        return match is not None and self.trusts(match[1])


def is_setting(name: str) -> bool:
    """Return whether a name in run.trust is that of a setting: an address, `hub:NAME` or `oc.env:NAME`."""
    if name.startswith(("hub:", "oc.env:")):
        return re.fullmatch(r"hub:[\w.-]+(/[\w.-]+)*|oc\.env:[A-Za-z_]\w*", name, re.ASCII) is not None
    return _CLEAN.fullmatch(name) is not None or _is_host(name)


def checked_setting(name: str, where: str) -> str:
    """Return the name of a setting that stands in run.trust, or behind `ddpexp trust`.

    Raises:
        RefusedError: it is not written like one.
    """
    if is_setting(name):
        return name
    raise RefusedError(
        "is not an address such as https://data.example.org, a host with its port, hub:NAME (a name on a hub) or "
        "oc.env:NAME (a variable of the environment)",
        key=where,
        place=name,
    )


def unrestated(
    values: Mapping[str, Any], written: Mapping[str, Any], read: Mapping[Place, str], grants: Grants
) -> list[Setting]:
    """Return the settings of a run directory that have to be restated.

    `values` are resolved and `written` are not; `read` has the resolvers that were refused, by where they are written.
    """
    found: list[tuple[Place, str, tuple[str, ...]]] = []
    for place, name in read.items():
        found.append((place, "a reference to the environment", (name,) if is_setting(name) else ()))
    texts = [one for one in leaves(values) if not grants.trusts_all_of(value_at_place(written, one[0]))]
    for place, value in [*texts, *_names(values)]:
        if isinstance(value, str) and not grants.restates(place):
            is_foreign = _is_foreign(values, place)
            found += [(place, "an address", names) for names in _addresses(value, grants, is_foreign)]
            if is_foreign and refers(value):
                found.append((place, "a fact of the data, which may be an address", ()))
    found += _on_hubs(values.get("data"), ("data",), grants)
    for place in _declared(values):
        if not grants.restates(place):
            found.append((place, "what its launcher or logger runs or connects to", ()))
    return _settings(found, written)


def to_restate(tree: Mapping[str, Any], folder: Path | None = None) -> list[Setting]:
    """Return the settings that the next reader of a configuration, as config.yaml has it, has to restate.

    `folder` is the --config-dir of that reader.
    """
    try:
        grants = Grants.of(written=tree, folder=folder)
        read: dict[Place, str] = {}
        for place, value in leaves(tree):
            names = _RESOLVER.findall(value) if isinstance(value, str) else ()
            if refused := [name for name in names if not (grants.trusts(name) or grants.restates(place))]:
                read[place] = refused[0]
        return unrestated(tree, tree, read, grants)
    except (RefusedError, ImportError, AttributeError):  # of a launcher: the resume will report it
        return []


def records_setting(override: str, grants: Grants) -> bool:
    """Return whether an override that the file of a sweep records, in Hydra's grammar, has to be restated."""
    key, _, value = override.lstrip("+~").removeprefix("hydra.sweeper.params.").replace("\\", "").partition("=")
    section, *names = key.split(".")
    rest = _VARIABLE.sub(lambda found: "" if grants.trusts(found[1]) else found[0], value)
    is_outside = section in ("data", "logger") or (names and names[-1] == _PRETRAINED)
    if "${" in rest and (is_outside or not _REFERENCE.fullmatch(rest)):
        return True  # what it stands for is known once the sweep is composed
    if (is_outside and re.search(r"\{[^{}]*:", value)) or (names and names[-1] == _PRETRAINED):
        return True  # a section with keys of its own, or a name on a hub
    on_hub = [tests[names[-1]] for tests in _HUB.values() if section == "data" and names and names[-1] in tests]
    for part in re.split(r"[,\[\](){}\s]+", value):
        text = part.strip("'\"")
        if text.startswith(HUB):
            return True
        if [*_addresses(text, grants)] or any(test(text) for test in on_hub if text not in ("", "null")):
            return True
    is_of_every = len(names) == 2 and names[1] in _OF_EVERY_LOGGER
    return section == "logger" and bool(names) and not is_of_every and not _is_number(value)


def _settings(found: Sequence[tuple[Place, str, tuple[str, ...]]], written: Mapping[str, Any]) -> list[Setting]:
    """Return what was found as settings, each key once, in the order of the configuration."""
    settings: dict[str, Setting] = {}
    for place, what, names in found:
        names_of_key = list(takewhile(lambda name: re.fullmatch(r"[A-Za-z_][\w-]*", str(name)), map(str, place)))
        key, value = ".".join(names_of_key), _closed(value_at_place(written, names_of_key), written)
        former = settings.get(key)
        if former is not None:
            what, names = former.what, (*former.trusts, *names) if former.trusts and names else ()
        settings[key] = Setting(key, value, what, tuple(dict.fromkeys(names)))
    return list(settings.values())


def _is_closed(text: str) -> bool:
    """Return whether a text refers to no other key, but at most to variables, facts and what else resolvers give."""
    return "${" not in _RESOLVED.sub("", text)


def _own_settings(folders: Sequence[Path]) -> set[tuple[Place, str]]:
    """Return the texts in the options of folders, each with its place in a configuration."""
    found = set()
    for path in (path for folder in folders for path in sorted(folder.glob("*/*.yaml"))):
        try:
            text = path.read_text()
            values = load_yaml(text)
        except (OSError, ValueError, yaml.YAMLError):
            continue  # composing reports it
        section = () if re.match(r"\s*#\s*@package\s+_global_", text) else (path.parent.name,)
        texts = ((place, value) for place, value in leaves(values) if isinstance(value, str) and _is_closed(value))
        found |= {((*section, *place), value) for place, value in texts}
    return found


def leaves(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield each value of a tree that is no mapping and no list, with its place."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from leaves(inner, (*place, name if isinstance(name, str) else str(name)))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*place, index))
    else:
        yield place, value


def _names(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield the names in mappings, each with the place of its value."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for name, inner in items:
        yield (*place, name), name
        yield from _names(inner, (*place, name))


def value_at_place(tree: Any, place: Sequence[str | int]) -> Any:
    """Return the value at a place of a tree; None if it is not there."""
    for name in place:
        if isinstance(tree, Mapping):
            tree = tree.get(name)
        else:
            index = int(name) if str(name).isdecimal() else -1
            tree = tree[index] if isinstance(tree, list | tuple) and 0 <= index < len(tree) else None
    return tree


def _addresses(text: str, grants: Grants, hosts: bool = True) -> Iterator[tuple[str, ...]]:
    """Yield for each address in a text that is not trusted the name that would trust it, if there is one.

    With `hosts` also for a host with its port.
    """
    text = unicodedata.normalize("NFKC", text).strip()  # as libraries may read it
    for part in text.split("::"):  # fsspec's way to write one address within another
        if "://" in part and not grants.trusts(part):
            clean = _CLEAN.fullmatch(part) if ".." not in part else None
            yield (clean[1],) if clean is not None else ()
    if hosts and _is_host(text) and not grants.trusts(text):
        yield (text.partition("/")[0],) if ".." not in text else ()


def _is_host(text: str) -> bool:
    return _HOST.fullmatch(text) is not None and _DEVICE.fullmatch(text) is None


def _is_foreign(values: Any, place: Place) -> bool:
    """Return whether the part that gets the value at a place is neither ddpexp's nor torch's: those take no hosts."""
    target, where = None, str(place[0])
    for end, name in enumerate(place[:-1], 1):
        values = value_at_place(values, (name,))
        if isinstance(values, Mapping) and "_target_" in values:
            target, where = values["_target_"], ".".join(map(str, place[:end]))
    if target is None:
        return place[0] not in (*FIELDS, "strategy")
    return key_of(where, target) is None and target not in TORCH and not str(target).startswith(RECIPES)


def _on_hubs(data: Any, place: Place, grants: Grants) -> Iterator[tuple[Place, str, tuple[str, ...]]]:
    """Yield the names in a section of data that a hub would be asked for."""
    if not isinstance(data, Mapping):
        return
    for key, is_name in _HUB.get(str(data.get("prepare")), {}).items():
        value = data.get(key)
        if isinstance(value, str) and is_name(value) and not (
            grants.restates((*place, key)) or grants.trusts(f"hub:{value}")
        ):  # fmt: skip
            yield (*place, key), "a name on a hub", (f"hub:{value}",)
    sources = data.get("sources")
    for name, source in sources.items() if isinstance(sources, Mapping) else ():
        yield from _on_hubs(source, (*place, "sources", str(name)), grants)


def _declared(values: Mapping[str, Any]) -> Iterator[Place]:
    """Yield the settings that launchers and loggers declare, and all texts of a logger that is not ddpexp's.

    Also numbers of 25 bits and more, which may be addresses of IP version 4.
    """
    if isinstance(launcher := values.get("launcher"), Mapping):
        declared = getattr(locate(str(launcher.get("_target_")), Trust(), "launcher"), "restate_on_resume", ())
        yield from (("launcher", name) for name in declared if launcher.get(name))
    loggers = values.get("logger")
    for name, logger in loggers.items() if isinstance(loggers, Mapping) else ():
        if not isinstance(logger, Mapping):
            continue
        where, key = f"logger.{name}", key_of(f"logger.{name}", logger.get("_target_"))
        if key is None:
            yield from (
                ("logger", str(name), *inner) for inner, value in leaves(logger)
                if inner[0] not in _OF_EVERY_LOGGER
                if isinstance(value, str) or (isinstance(value, int) and value >> 24)
            )  # fmt: skip
        elif is_remote_logger(where, key):
            declared = locate(key, Trust(), where).restate_on_resume
            yield from (("logger", str(name), option) for option in declared if logger.get(option))


def _closed(value: Any, tree: Mapping[str, Any], depth: int = 10) -> Any:
    """Return a value with what its references to other keys stand for, so that it can be read and restated."""
    if isinstance(value, Mapping):
        return {name: _closed(inner, tree, depth) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_closed(inner, tree, depth) for inner in value]
    if not isinstance(value, str) or not depth:
        return value

    def target(found: re.Match[str]) -> Any:
        value = _closed(value_at_place(tree, found[0][2:-1].split(".")), tree, depth - 1)
        return found[0] if value is None else value  # a relative reference, for example

    whole = _REFERENCE.fullmatch(value)
    return target(whole) if whole is not None else _REFERENCE.sub(lambda found: str(target(found)), value)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[\s\d.,eE+-]*|true|false|null", text) is not None


def _written(value: Any) -> str:
    """Return a value as it is typed: in YAML, which all overrides of a stored configuration are read as."""
    try:
        plain = isinstance(value, str) and load_yaml(value) == value
    except (ValueError, yaml.YAMLError):
        plain = False
    return value if plain else json.dumps(value)
