"""What other installed packages add: launchers, loggers, schedules and recipes, each with its YAML files."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from ddpexp.config.registry import key_of, key_of_class, section_of
from ddpexp.system import files
from ddpexp.system.yaml_text import load_yaml

GROUPS = {  # of entry points, `name = package.module:Class`, by the section whose `_target_` may name them
    "launcher": "ddpexp.launchers",
    "logger": "ddpexp.loggers",
    "callbacks": "ddpexp.callbacks",
    "scheduler": "ddpexp.schedulers",
    "strategy": "ddpexp.strategies",  # of its options, by strategy.kind
}
RECIPES = "ddpexp.recipes"  # `name = package`: the code that the configs in this package name is trusted
_SECTION = re.compile(r"^\[project\.entry-points\.[\"'](ddpexp\.\w+)[\"']\][^\n]*\n(.*?)(?=^\[|\Z)", re.M | re.S)
_ENTRY = re.compile(r"^\s*[\"']?([\w.-]+)[\"']?\s*=\s*[\"']([^\"']+)[\"']", re.M)
_OBJECT = re.compile(r"(\w+(?:\.\w+)*)\s*:\s*(\w+(?:\.\w+)*)")


@cache
def _entry_points() -> Mapping[str, Mapping[str, str]]:
    """Return what the installed packages' entry points name, by group and name."""
    entry_points = metadata.entry_points()
    return {
        group: {point.name: point.value.partition("[")[0].strip() for point in entry_points.select(group=group)}
        for group in (*GROUPS.values(), RECIPES)
    }


def installed(section: str) -> Mapping[str, str]:
    """Return the full name of each class or function that an installed package offers for a section.

    By the name of its entry point.
    """
    if section not in GROUPS:
        return {}  # without a search among the installed packages
    points = _entry_points()[GROUPS[section]]
    matches = {name: _OBJECT.fullmatch(value) for name, value in points.items()}
    return {name: f"{match[1]}.{match[2]}" for name, match in matches.items() if match is not None}


def full_name(where: str, target: Any) -> Any:
    """Return the full name of what `target` names at the key `where`, if it is the name of an entry point."""
    if not isinstance(target, str) or key_of(where, target) is not None:
        return target
    return installed(section_of(where)).get(target, target)


def launcher_name(kind: type) -> str:
    """Return how a launcher class is typed: `launcher=NAME`."""
    path = f"{kind.__module__}.{kind.__qualname__}"
    offered = next((name for name, target in installed("launcher").items() if target == path), None)
    return key_of_class("launcher", kind) or offered or kind.__name__.lower()


def plugin_folders() -> list[Path]:
    """Return the folders `conf` of those packages, in which `launcher/<name>.yaml` and the like lie.

    Imports none of them.
    """
    return list(_conf_folders([value for points in _entry_points().values() for value in points.values()]))


def _conf_folders(values: Iterable[str]) -> dict[Path, str]:
    """Return the folders `conf` of the packages that entry points name, each with its top-level package."""
    return {
        folder / "conf": package
        for package in _packages(values)
        for folder in _folders(package)
        if (folder / "conf").is_dir()
    }


def _packages(values: Iterable[str]) -> list[str]:
    """Return the top-level packages that entry points name."""
    return list(dict.fromkeys(value.partition(":")[0].partition(".")[0].strip() for value in values))


def package_folder(name: str) -> tuple[str, list[Path]]:
    """Return the top-level package of `package.folder` or `package/folder`, and where that folder is."""
    root, *rest = name.replace("/", ".").split(".")
    paths = [folder.joinpath(*rest) for folder in _folders(root)]
    return root, [path for path in paths if path.is_dir()]


def hidden(name: str = "") -> str:
    """Return a sentence on an installed package that another folder hides from Python; empty where there is none.

    It is the package of `name`, such as `package.module.Class`, or any one. Python looks in the folder of a program
    first, or in the current one, and takes what it finds there under the name of the package.
    """
    root = name.partition(".")[0]
    for package in _packages(value for points in _entry_points().values() for value in points.values()):
        folders = _folders(package) if root in ("", package) else []
        if folders and not any((folder / "conf").is_dir() for folder in folders):
            return (
                f"Python takes the folder {folders[0]} for the installed package {package}, which is "
                f"elsewhere: work in another folder, or rename this one. A project keeps its package in src, as one of "
                f"ddpexp new does."
            )
    return ""


def uninstalled(option: str) -> str:
    """Return a sentence on a project whose entry points pip has not installed, or not since they changed; else empty.

    It is in the current folder, in one above it, or in one that is called as the option that was not found.
    """
    here = Path.cwd()
    for path in (folder / "pyproject.toml" for folder in (here / option, here, *here.parents)):
        for group, name, value in _declared(path):
            if _entry_points().get(group, {}).get(name) != value:
                folder = files.shortest(path.parent)
                return (
                    f"{files.typed(path)} declares {name} for {group}, and that is not installed: type pip install -e "
                    f"{shlex.quote(folder if folder.startswith(('.', '/')) else f'./{folder}')} and repeat the command."
                )
    return ""


def _declared(project: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the group, the name and the value of each entry point in a pyproject.toml, if there is one."""
    with suppress(OSError, ValueError):
        for group, lines in _SECTION.findall(project.read_text()):
            yield from ((group, name, value.partition("[")[0].strip()) for name, value in _ENTRY.findall(lines))


def _folders(package: str) -> list[Path]:
    """Return the folders of an installed package, which is not imported."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []  # a name that no package can have
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []


@cache
def offered_targets(searched: tuple[tuple[Path, str], ...]) -> frozenset[str]:
    """Return the names that installed packages' own configs give of their own code.

    `searched` are the folders that packages have Hydra search, each with its top-level package.
    """
    names = set()
    for folder, package in {**_conf_folders(_entry_points()[RECIPES].values()), **dict(searched)}.items():
        for path in sorted(folder.rglob("*.yaml")) if package else ():
            with suppress(OSError, ValueError, yaml.YAMLError):
                names |= set(_named(load_yaml(path.read_text()), package))
    return frozenset(names)


def _named(values: Any, package: str) -> Iterator[str]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            if key in ("_target_", "prepare") and str(value).startswith(f"{package}."):
                yield str(value)
            yield from _named(value, package)
    elif isinstance(values, list):
        for value in values:
            yield from _named(value, package)
