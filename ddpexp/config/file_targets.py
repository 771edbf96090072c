"""Config files that give a section a `_target_` of their own: keys of the class or function before it do not count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from ddpexp.config.folders import LISTED
from ddpexp.config.typed_targets import keys_of_target
from ddpexp.errors import RefusedError
from ddpexp.system.yaml_text import load_yaml

SECTIONS = ("task", "model", "data", "optimizer", "scheduler", "strategy", "launcher", *LISTED)


def inherited_keys(files: Sequence[tuple[Path, str]], typed: Mapping[str, str]) -> tuple[list[str], set[str]]:
    """Return the sections whose `_target_` (or `strategy.kind`) a later file replaces, and the keys left in them.

    The keys come first: those that Hydra merges, and that belong to what was replaced.

    `files` are those of a defaults list in their order, each with the package where its keys belong; `typed` are the
    overrides by their keys.

    Raises:
        RefusedError: a file replaces the `_target_` of a typed option, which would have no effect.
    """
    merged: dict[str, Any] = {}  # as Hydra merges them
    wanted: dict[str, Any] = {}
    replaced: set[str] = set()
    for path, package in files:
        values = _below(package, _read(path))
        for section in SECTIONS:
            node = values.get(section)
            if not isinstance(node, Mapping):
                continue
            if section in typed and path.parent.name != section and _replaces(section, wanted.get(section), node):
                raise _no_effect(typed[section], section, path, node[_name(section)])
        _merge(merged, values)
        _merge(wanted, values, replaced)
    surplus = [key for section in SECTIONS for key in _surplus(merged.get(section), wanted.get(section), section)]
    return surplus, replaced


def _name(place: str) -> str:
    """Return the key by which a section names its class or function."""
    return "kind" if place == "strategy" else "_target_"


def _no_effect(typed: str, section: str, path: Path, target: object) -> RefusedError:
    return RefusedError(
        f"{typed} has no effect: {path} itself sets {section}.{_name(section)} to {target}. Leave {typed} out, or move "
        f"that section into an option, {section}/{path.stem}.yaml, which the file chooses under defaults as "
        f"- override /{section}: {path.stem}."
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        values = load_yaml(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):  # Hydra reports it
        return {}
    return {key: value for key, value in values.items() if key != "defaults"} if isinstance(values, dict) else {}


def _below(package: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in reversed([key for key in package.split(".") if key not in ("", "_global_")]):
        values = {key: values}
    return values


def _merge(tree: dict[str, Any], values: Mapping[str, Any], replaced: set[str] | None = None, place: str = "") -> None:
    """Merge values into a tree; with `replaced` without the keys of a `_target_` that they replace, which it notes."""
    if replaced is not None and _replaces(place, tree, values):
        replaced.add(place)
        for key in keys_of_target(tree, place):
            del tree[key]
    for key, value in values.items():
        name = f"{place}.{key}" if place else str(key)
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _merge(tree[key], value, replaced, name)
        else:
            tree[key] = deepcopy(value)


def _replaces(place: str, before: Any, values: Mapping[str, Any]) -> bool:
    """Return whether values name another class or function than the section before them."""
    name = _name(place)
    target = before.get(name) if isinstance(before, Mapping) else None
    return target is not None and name in values and target != values[name]


def _surplus(merged: Any, wanted: Any, place: str) -> Iterator[str]:
    """Yield the keys of a tree that another lacks."""
    if isinstance(merged, Mapping) and isinstance(wanted, Mapping):
        for key, value in merged.items():
            if key in wanted:
                yield from _surplus(value, wanted[key], f"{place}.{key}")
            else:
                yield f"{place}.{key}"
