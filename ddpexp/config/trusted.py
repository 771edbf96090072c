"""What the user has trusted once, with `ddpexp trust`, in the words of `run.trust=[...]`.

These are names of installed packages, and settings of run directories: addresses, names on a hub and variables of the
environment. The list is a file of the user's own, never of a run or of a recipe. The entry of a package holds where it
was found: a module of that name in another place, such as the current folder, is not trusted by it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ddpexp.errors import RefusedError
from ddpexp.system import files

_TOO_WIDE = ("torch", "numpy", "ddpexp")  # packages of which a whole can load files or run programs


@dataclass(frozen=True)
class Trusted:
    """A name that is trusted, and the package that it was when the user said so."""

    name: str  # `package` or `package.module.Class`; of a setting with a colon, and the others are empty
    distribution: str
    version: str
    place: str  # of the top-level module

    def covers(self, target: str) -> bool:
        """Return whether it names `target`, or something that this lies in."""
        return target == self.name or target.startswith(f"{self.name}.")


def list_file() -> Path:
    """Return the file, whether it is there or not."""
    home = os.environ.get("XDG_CONFIG_HOME")
    folder = Path(home) if home and os.path.isabs(home) else Path("~/.config").expanduser()
    return folder / "ddpexp" / "trusted.json"


def read() -> list[Trusted]:
    """Return the entries in the order in which they were added.

    Raises:
        RefusedError: others can write the file, or it is damaged.
    """
    path = list_file()
    try:
        facts = path.stat()
    except OSError:
        return []
    if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise RefusedError(
            "decides whose code runs, and others can write it",
            suggestion="Make it yours alone (chmod 600), or remove it.",
            place=path,
        )
    try:
        entries: list[dict[str, Any]] = files.read_json(path)["trusted"]
        return [Trusted(**{key: str(entry[key]) for key in Trusted.__dataclass_fields__}) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RefusedError(
            f"cannot be read ({type(error).__name__}: {error})", suggestion="Remove it.", place=path
        ) from None


def settings() -> list[str]:
    """Return the names of settings: see `ddpexp.config.restated`. Raises: RefusedError, as `read` does."""
    return [entry.name for entry in read() if ":" in entry.name]


def write(entries: Iterable[Trusted]) -> None:
    """Replace the entries."""
    path = list_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = json.dumps({"trusted": [asdict(entry) for entry in entries]}, indent=2)
        files.write_data(path, text.encode(), 0o600)  # as it is: its paths are compared, and it is the user's alone
    except OSError as error:
        raise RefusedError(f"cannot be written: {error.strerror}", place=path) from None


def find(name: str) -> Trusted:
    """Return an entry for a name, without importing it.

    Raises:
        RefusedError: it is not of an installed package, or its package is too wide to be trusted as a whole.
    """
    root, typed = name.partition(".")[0], f"trust {name}"
    if not all(part.isidentifier() for part in name.split(".")):
        raise RefusedError(
            suggestion="Use the name of a package, or of a class in it, such as package.Class.", place=typed
        )
    if root in sys.stdlib_module_names:
        raise RefusedError("Python's own modules can run any program, so they are never trusted", place=typed)
    if root == "ddpexp":
        raise RefusedError("Classes and functions of ddpexp need no trust", place=typed)
    if name in _TOO_WIDE:
        raise RefusedError(
            "Functions of it can load files that run code",
            suggestion="Name the class that you need, in full.",
            place=typed,
        )
    distributions = metadata.packages_distributions().get(root, [])
    place = place_of(root)
    if not distributions or place is None:
        hint = _imports_of(name)
        raise RefusedError(
            f"There is no installed package with a module {root}",
            suggestion=f"{hint} Code of your own is trusted by --config-dir DIR, or for a command by run.trust=[...].",
            place=typed,
        )
    distribution = metadata.distribution(distributions[0])
    if not _is_installed_at(distribution, root, place):
        raise RefusedError(
            f"The module is found at {place}, which is not where the package {distributions[0]} is installed",
            suggestion="Run the command in another folder, or rename that module.",
            place=typed,
        )
    return Trusted(name, distributions[0], distribution.version, place)


def place_of(root: str) -> str | None:
    """Return the folder or file of a top-level module, without importing it."""
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    locations = list(spec.submodule_search_locations or [])
    place = locations[0] if locations else spec.origin
    return os.path.realpath(place) if place is not None else None


def covered(targets: Iterable[str]) -> set[str]:
    """Return the names that are trusted here: of entries whose package is in the place where it was."""
    entries = read() if (targets := list(targets)) else []
    places: dict[str, str | None] = {}
    found = set()
    for target in targets:
        root = target.partition(".")[0]
        for entry in entries:
            if entry.covers(target):
                if root not in places:
                    places[root] = place_of(root)
                if places[root] == entry.place:
                    found.add(target)
    return found


def advice(target: str) -> str:
    """Return how a name of an installed package is trusted for good, as a sentence with a space in front."""
    root = target.partition(".")[0]
    place = place_of(root) if root.isidentifier() else None
    entry = next((entry for entry in read() if entry.covers(target)), None)
    if entry is not None and place != entry.place:
        return f" It is trusted at {entry.place}, and here it is {place or 'not installed'}: ddpexp trust {entry.name}."
    if place is None or not metadata.packages_distributions().get(root) or place_is_below(place, os.getcwd()):
        return ""
    return f" To trust it once for all commands: ddpexp trust {target}."


def place_is_below(place: str, folder: str) -> bool:
    """Return whether a place lies in a folder."""
    return Path(place).is_relative_to(os.path.realpath(folder))


def _is_installed_at(distribution: metadata.Distribution, root: str, place: str) -> bool:
    """Return whether a place is that of an installed package, which may be installed as editable."""
    installed = {os.path.realpath(str(distribution.locate_file(name))) for name in (root, f"{root}.py")}
    if place in installed:
        return True
    for file in distribution.files or ():
        if file.parts[0].partition(".")[0] == root and os.path.realpath(str(file.locate())) == place:
            return True  # a compiled module
    try:
        direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return False
    url = str(direct.get("url", ""))
    return url.startswith("file://") and place_is_below(place, url.removeprefix("file://"))


def _imports_of(name: str) -> str:
    """Say which modules the package of that name has, where it is one."""
    roots = [
        root for root, names in metadata.packages_distributions().items()
        if name.lower() in (known.lower() for known in names) and root.isidentifier()
    ]  # fmt: skip
    return f" The package {name} has the module {', '.join(sorted(roots))}: trust that." if roots else ""
