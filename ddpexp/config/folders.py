"""The folders of YAML files that a command reads: ours, the user's own, those of installed packages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from ddpexp.errors import RefusedError
from ddpexp.system.text import is_utf8

LISTED = ("logger", "callbacks")  # groups of which a run may choose several options, as a list
_LOOKED_INTO = 200  # entries of a folder, when there is nothing in it that we look for


def conf_folder() -> Path:
    """Return the folder of our YAML files, in a checkout and in an installed wheel alike."""
    import ddpexp

    for place in ddpexp.__path__:
        if (Path(place) / "conf" / "config.yaml").is_file():
            return Path(place) / "conf"
    raise RefusedError("ddpexp's own configs (ddpexp/conf) are not installed", suggestion="Reinstall ddpexp.")


@cache
def our_options() -> Mapping[str, Sequence[str]]:
    """Return the options of each of our own groups."""
    return {group: options(group, [conf_folder()]) for group in groups([conf_folder()])}


def groups(folders: Iterable[Path]) -> list[str]:
    """Return the groups that have an option in one of the folders."""
    return sorted({path.parent.name for folder in folders for path in folder.glob("*/*.yaml")})


def options(group: str, folders: Iterable[Path]) -> list[str]:
    """Return the options of a group."""
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def config_dir_of(typed: str | None) -> Path | None:
    """Return the folder that was typed as --config-dir, None where none was.

    Raises:
        RefusedError: it is no folder, or none of which Hydra would read anything.
    """
    if typed is None:
        return None
    if not typed:
        raise RefusedError(
            "is empty: it takes the folder of your configs, such as --config-dir mine/conf", key="--config-dir"
        )
    folder, option = Path(typed).resolve(), f"--config-dir {typed}"
    if not folder.is_dir():
        raise RefusedError("is not a directory", suggestion=_not_a_folder(folder, typed), place=option)
    if not is_utf8(str(folder)):
        raise RefusedError(
            f"The path {folder} is not UTF-8, and Hydra reads no other", suggestion="Rename it.", place=option
        )
    ours = our_options()
    if any(options(group, [folder]) for group in ours):
        return folder
    suggestion = next(_suggestions(folder, ours), None)
    if suggestion is not None:
        shown = Path(typed, suggestion.relative_to(folder)) if suggestion.is_relative_to(folder) else Path(typed).parent
        raise RefusedError(
            f"has no folder of options such as recipe, but {shown} has",
            suggestion=f"Type --config-dir {shown}.",
            place=option,
        )
    if not groups([folder]) and not any(folder.glob("hydra/*/*.yaml")):
        raise RefusedError(
            f"adds nothing: {_instead(folder, typed, ours)}",
            suggestion=f"Options are files such as {Path(typed, 'recipe/NAME.yaml')}, which recipe=NAME chooses.",
            place=option,
        )
    return folder  # only groups of the user's own, such as experiment


def _not_a_folder(folder: Path, typed: str) -> str:
    """Say what may be meant by something else than a folder."""
    if folder.is_file() and folder.suffix == ".yaml" and folder.parent.name in our_options():
        return (
            f"Type the folder of its group's folder: --config-dir {Path(typed).parent.parent} "
            f"{folder.parent.name}={folder.stem}."
        )
    if typed != typed.strip() and Path(typed.strip()).is_dir():
        return f"It has a space at its end: type --config-dir {typed.strip()}."
    return "The shell makes a folder of ~ only where it begins a word: --config-dir ~/..." if typed[:1] == "~" else ""


def _suggestions(folder: Path, ours: Collection[str]) -> Iterator[Path]:
    """Yield the folders that may be meant: the one above, when this is the folder of a group, or one below."""
    if folder.name in ours and any(folder.glob("*.yaml")):
        yield folder.parent
    for _, path in zip(range(_LOOKED_INTO), sorted(folder.glob("*/")), strict=False):
        if path.is_dir() and any(options(group, [path]) for group in ours):
            yield path


def _instead(folder: Path, typed: str, ours: Collection[str]) -> str:
    """Say what there is in a folder without options."""
    for path in folder.glob("*.y*ml"):
        if path.suffix in (".yaml", ".yml"):
            return f"{path.name} lies in no folder of a group, so Hydra does not read it"
    for group in ours:
        for path in (folder / group).glob("*.yml"):
            return f"the name of {Path(typed, group, path.name)} must end in .yaml"
    if any(folder.glob("*.py")):
        return "it has Python files, but no YAML of a group"
    return "it is empty" if not any(folder.iterdir()) else "no YAML in it belongs to a group"
