"""What other installed packages add: launchers, each with its YAML file."""

from __future__ import annotations

import importlib.util
from functools import cache
from importlib import metadata
from pathlib import Path

GROUP = "ddpexp.launchers"  # of entry points: `name = package.module:Class`


@cache
def installed_launchers() -> dict[str, str]:
    """Return the full name of each launcher class that an installed package offers, by the name of its entry point."""
    return {point.name: point.value.partition("[")[0].strip().replace(":", ".") for point in metadata.entry_points(group=GROUP)}


def plugin_folders() -> list[Path]:
    """Return the folders `conf` of those packages, in which `launcher/<name>.yaml` lies; imports none of them."""
    folders = []
    for target in installed_launchers().values():
        try:
            spec = importlib.util.find_spec(target.partition(".")[0])
        except (ImportError, ValueError):
            continue  # a name that no package can have
        for place in (spec.submodule_search_locations or []) if spec else []:
            folder = Path(place) / "conf"
            if (folder / "launcher").is_dir() and folder not in folders:
                folders.append(folder)
    return folders
