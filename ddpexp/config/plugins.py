"""What other installed packages add: launchers, each with its YAML file, and folders of configs that Hydra searches."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from ddpexp.config.registry import key_of_class

GROUP = "ddpexp.launchers"  # of entry points: `name = package.module:Class`
STRATEGIES = "ddpexp.strategies"  # of entry points: `kind = package.module:Options`


def installed_launchers() -> dict[str, str]:
    """Return the full name of each launcher class that an installed package offers, by the name of its entry point."""
    return _installed(GROUP)


def installed_strategies() -> dict[str, str]:
    """Return the full name of the options class of each strategy that an installed package offers, by its kind."""
    return _installed(STRATEGIES)


@cache
def _installed(group: str) -> dict[str, str]:
    return {
        point.name: point.value.partition("[")[0].strip().replace(":", ".")
        for point in metadata.entry_points(group=group)
    }


def launcher_name(kind: type) -> str:
    """Return how a launcher class is typed: `launcher=NAME`."""
    path = f"{kind.__module__}.{kind.__qualname__}"
    offered = next((name for name, target in installed_launchers().items() if target == path), None)
    return key_of_class("launcher", kind) or offered or kind.__name__.lower()


def plugin_folders() -> list[Path]:
    """Return the folders `conf` of those packages, in which `launcher/<name>.yaml` lies; imports none of them."""
    folders = []
    for group, targets in (("launcher", installed_launchers()), ("strategy", installed_strategies())):
        for target in targets.values():
            for place in _places(target.partition(".")[0]):
                folder = place / "conf"
                if (folder / group).is_dir() and folder not in folders:
                    folders.append(folder)
    return folders


def searched_packages() -> dict[Path, str]:
    """Return the folders that installed packages have Hydra search, by a SearchPathPlugin.

    Each with its top-level package.

    Of a folder outside of any package that is empty. The plugins have been imported by then: Hydra does so whenever it
    starts.
    """
    from hydra._internal.utils import (
        create_config_search_path,
    )  # workers, which have no use for Hydra, import this module too

    found: dict[Path, str] = {}
    for element in create_config_search_path("pkg://ddpexp.conf").get_path():
        if element.provider in ("hydra", "main", "schema"):
            continue
        scheme, separator, name = (element.path or "").rpartition("://")
        if scheme == "pkg":
            root, *rest = name.replace("/", ".").split(".")
            found |= {place.joinpath(*rest): root for place in _places(root) if place.joinpath(*rest).is_dir()}
        elif scheme in ("", "file") and (separator or name) and Path(name).is_dir():
            found[Path(name)] = ""
    return found


def _places(package: str) -> list[Path]:
    """Return the folders of an installed package, which is not imported."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []  # a name that no package can have
    return [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []


@cache
def offered_targets() -> frozenset[str]:
    """Return the names that installed packages' own configs, which Hydra searches, give of their own code."""
    found = set()
    for folder, package in searched_packages().items():
        for path in sorted(folder.rglob("*.yaml")) if package else ():
            with suppress(OSError, ValueError, yaml.YAMLError):
                found |= set(
                    _named(yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), package)
                )
    return frozenset(found)


def _named(values: Any, package: str) -> Iterator[str]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            if key in ("_target_", "prepare") and str(value).startswith(f"{package}."):
                yield str(value)
            yield from _named(value, package)
    elif isinstance(values, list):
        for value in values:
            yield from _named(value, package)
