"""Sections whose `_target_` an override or a config file replaces: keys of the class or function before it go."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from ddpexp.config.declared import SECTIONS
from ddpexp.config.keys import override_key, value_at
from ddpexp.config.registry import keys_of
from ddpexp.errors import RefusedError
from ddpexp.loggers.remote.base import Keys
from ddpexp.settings.data import DATA_KEYS
from ddpexp.system.yaml_text import load_yaml

_SECTIONS = [name for name, section in SECTIONS.items() if section.target]
_TARGET = re.compile(r"\+{0,2}((?:task|model|data|optimizer|scheduler)(?:\.\w+)*)\._target_=(.*)")
_OF_REMOTE_LOGGERS = re.compile(rf"logger\.([\w-]+)\.(?:{'|'.join(Keys.__dataclass_fields__)})")


def typed_targets(overrides: Sequence[str]) -> dict[str, str]:
    """Return the sections whose `_target_` is overridden, each with the new target; outer sections first."""
    targets = {match[1]: match[2] for override in overrides if (match := _TARGET.match(override))}
    return dict(sorted(targets.items(), key=lambda item: item[0].count(".")))


def is_in(override: str, nodes: Iterable[str]) -> bool:
    """Return whether an override sets a key in one of the sections."""
    return any(override_key(override).startswith(f"{node}.") for node in nodes)


def with_plus_plus(overrides: Sequence[str], nodes: Iterable[str]) -> list[str]:
    """Prefix ++ to the overrides whose key no file has: those in `nodes`, whose target is new, and unlisted ones."""
    return [
        f"++{override}"
        if override[:1] not in "+~" and (is_in(override, nodes) or counts_unlisted(override))
        else override
        for override in overrides
    ]


def counts_unlisted(override: str) -> bool:
    """Return whether an override sets a key that counts although no file lists it.

    That is one of every remote logger: whether the logger of a package is remote is known only where its class is
    imported.
    """
    of_logger = _OF_REMOTE_LOGGERS.fullmatch(override.partition("=")[0])
    return of_logger is not None and of_logger[1] not in keys_of("logger")


def keys_of_target(node: Any, name: str) -> list[str]:
    """Return the keys of a section that belong to its target, not to every kind of data."""
    general = {"_target_", *DATA_KEYS} - {"prepare"} if name == "data" else {"_target_"}
    return [str(key) for key in node if key not in general] if isinstance(node, Mapping) else []


def without_inherited(
    overrides: Sequence[str], files: Sequence[tuple[Path, str]], compose: Callable[[Sequence[str]], Mapping[str, Any]]
) -> list[str]:
    """Return overrides that also delete the keys which files give for another `_target_` than the one that counts.

    `files` are those of the defaults list in their order, each with the package where its keys belong; `compose`
    composes plain values from overrides.

    Raises:
        RefusedError: a file replaces the `_target_` of a typed option, which would have no effect.
    """
    surplus, replaced = _inherited(files, {override.lstrip("+").partition("=")[0]: override for override in overrides})
    removed: dict[str, list[str]] = {}
    if typed := typed_targets(overrides):
        before = compose([override for override in overrides if not is_in(override, typed)])
        for name, target in typed.items():
            node = value_at(before, name)
            same = isinstance(node, Mapping) and node.get("_target_") == target
            if not same and not is_in(f"{name}._target_", removed):
                removed[name] = keys_of_target(node, name)
    # Hydra cannot delete a null or an interpolation that does not resolve, so the key gets a plain value first.
    deletions = [
        override
        for key in dict.fromkeys([*surplus, *(f"{name}.{key}" for name, keys in removed.items() for key in keys)])
        for override in (f"++{key}=0", f"~{key}")
    ]
    rest = [override for override in overrides if override[0] != "~" or not is_in(override, removed)]
    return [*deletions, *with_plus_plus(rest, {*removed, *replaced})]


def _inherited(files: Sequence[tuple[Path, str]], typed: Mapping[str, str]) -> tuple[list[str], set[str]]:
    """Return the keys that files leave in sections whose `_target_` (or `strategy.kind`) a later one replaces.

    They are those that Hydra merges, and that belong to what was replaced; the sections come second. `typed` are the
    overrides by their keys.
    """
    merged: dict[str, Any] = {}  # as Hydra merges them
    wanted: dict[str, Any] = {}
    replaced: set[str] = set()
    for path, package in files:
        values = in_package(package, _read(path))
        for section in _SECTIONS:
            node = values.get(section)
            if not isinstance(node, Mapping):
                continue
            if section in typed and path.parent.name != section and _replaces(section, wanted.get(section), node):
                raise _no_effect(typed[section], section, path, node[_name(section)])
        _merge(merged, values)
        _merge(wanted, values, replaced)
    surplus = [key for section in _SECTIONS for key in _surplus(merged.get(section), wanted.get(section), section)]
    return surplus, replaced


def _name(where: str) -> str:
    """Return the key by which a section names its class or function."""
    return "kind" if where == "strategy" else "_target_"


def _no_effect(typed: str, section: str, path: Path, target: object) -> RefusedError:
    return RefusedError(
        f"has no effect: {path} itself sets {section}.{_name(section)} to {target}",
        suggestion=f"Leave {typed} out, or move that section into an option, {section}/{path.stem}.yaml, "
        f"which the file chooses under defaults as - override /{section}: {path.stem}.",
        place=typed,
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        values = load_yaml(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):  # Hydra reports it
        return {}
    return {key: value for key, value in values.items() if key != "defaults"} if isinstance(values, dict) else {}


def in_package(package: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a file with the sections around them that its package names."""
    for key in reversed([key for key in package.split(".") if key not in ("", "_global_")]):
        values = {key: values}
    return values


def _merge(tree: dict[str, Any], values: Mapping[str, Any], replaced: set[str] | None = None, where: str = "") -> None:
    """Merge values into a tree; with `replaced` without the keys of a `_target_` that they replace, which it notes."""
    if replaced is not None and _replaces(where, tree, values):
        replaced.add(where)
        for key in keys_of_target(tree, where):
            del tree[key]
    for key, value in values.items():
        name = f"{where}.{key}" if where else str(key)
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _merge(tree[key], value, replaced, name)
        else:
            tree[key] = deepcopy(value)


def _replaces(where: str, before: Any, values: Mapping[str, Any]) -> bool:
    """Return whether values name another class or function than the section before them."""
    name = _name(where)
    target = before.get(name) if isinstance(before, Mapping) else None
    return target is not None and name in values and target != values[name]


def _surplus(merged: Any, wanted: Any, where: str) -> Iterator[str]:
    """Yield the keys of a tree that another lacks."""
    if isinstance(merged, Mapping) and isinstance(wanted, Mapping):
        for key, value in merged.items():
            if key in wanted:
                yield from _surplus(value, wanted[key], f"{where}.{key}")
            else:
                yield f"{where}.{key}"
