"""Check the values of a composed configuration against the files that they come from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpexp.config import facts
from ddpexp.config.folders import conf_folder, options, our_options
from ddpexp.config.plugins import plugin_folders
from ddpexp.config.registry import key_of
from ddpexp.config.replaced_targets import typed_targets
from ddpexp.errors import RefusedError, shown
from ddpexp.settings.data import DATA_KEYS
from ddpexp.system.text import is_number
from ddpexp.system.yaml_text import load_yaml

if TYPE_CHECKING:  # a stored configuration is resolved without Hydra
    from ddpexp.config.tree import Tree


def check_values(values: Mapping[str, Any], tree: Tree) -> None:
    """Check the resolved values of a tree.

    Raises:
        RefusedError: a file grants trust, an option of ours hides the chosen one, or a value has another type than its
            default.
    """
    _check_trust_is_typed(values, tree.overrides)
    if tree.config_dir is not None:
        _check_chosen_is_used(tree.config_dir, tree.choices, values)
    _check_types(values, tree)


def warnings_of(tree: Tree) -> tuple[str, ...]:
    """Return the warnings about the user's and the packages' files."""
    config_dir = tree.config_dir
    folders = ([config_dir] if config_dir else []) + plugin_folders()
    unchosen = _unchosen(config_dir, tree.choices.get("recipe", ""), tree.overrides) if config_dir else ()
    return (*unchosen, *(warning for folder in folders for warning in _shadowed(folder)))


def _unchosen(config_dir: Path, recipe: str, overrides: Sequence[str]) -> Iterator[str]:
    """Yield a warning if the user's folder has recipes and the command leaves the default one."""
    ours = our_options()["recipe"]
    theirs = [name for name in options("recipe", [config_dir]) if name not in ours]
    chooses = any(re.match(r"recipe=|\+[\w/]+=", override) for override in overrides)
    if recipe in ours and theirs and not chooses:
        offered = " or ".join(f"recipe={name}" for name in theirs)
        default = f"no recipe is chosen, so the default is used, recipe={recipe}"
        yield f"{default}; to use one of {config_dir}, add {offered}."


def _shadowed(folder: Path) -> Iterator[str]:
    """Yield a warning for each option file of a folder that a shipped file of the same name hides."""
    for path, _ in _hidden(folder):
        name = path.relative_to(folder).with_suffix("")
        yield f"{path} is not used: ddpexp has its own {name}. Give yours another name."


def _check_chosen_is_used(config_dir: Path, choices: Mapping[str, str], values: Mapping[str, Any]) -> None:
    for path, ours in _hidden(config_dir):
        group, option = path.parent.name, path.stem
        several = values.get(group) if group not in choices else None  # the loggers of a list, by their names
        if choices.get(group) == option or (isinstance(several, Mapping) and option in several):
            raise RefusedError(
                f"is chosen, and two files have that name: {path}, which is hidden, and ddpexp's own {ours}",
                key=group,
                value=option,
                suggestion=f"Give yours another name, such as {group}/my_{option}.yaml for {group}=my_{option}.",
            )


def _hidden(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield each option file of a folder with the shipped file that hides it: Hydra searches shipped files first."""
    for path in sorted(folder.glob("*/*.yaml")):
        ours = conf_folder() / path.relative_to(folder)
        if ours.is_file():
            yield path, ours


def _check_trust_is_typed(values: Mapping[str, Any], typed: Sequence[str]) -> None:
    run = values.get("run")
    if not isinstance(run, Mapping):
        raise RefusedError("is not a section", key="run", value=run, suggestion="Set its keys, such as run.dir=... .")
    if run.get("trust") and not any(override.lstrip("+").startswith("run.trust=") for override in typed):
        raise RefusedError("is set in a file, and counts only on the command line", key="run.trust", value=run["trust"])
    if run.get("allow_changes") and not any(
        override.lstrip("+").startswith("run.allow_changes=") for override in typed
    ):
        raise RefusedError(
            "is set in a file: it is for one start, so it counts only on the command line",
            key="run.allow_changes",
            value=run["allow_changes"],
        )
    if run.get("code"):
        raise RefusedError(
            "cannot be set",
            key="run.code",
            value=run["code"],
            suggestion="Type --config-dir DIR to use the code beside DIR.",
        )


def _check_types(values: Mapping[str, Any], tree: Tree) -> None:
    """Compare the values of sections with a `_target_` with the types in the chosen option's own file.

    The other sections are typed, and so are our schedules: `parse` checks them. Sections whose `_target_` is typed have
    no file to compare with.
    """
    sections = ["task", "model", "data", "optimizer"]
    scheduler = values.get("scheduler")
    if isinstance(scheduler, Mapping) and key_of("scheduler", scheduler.get("_target_")) is None:
        sections.append("scheduler")
    replaced = typed_targets(tree.overrides)
    sections = [section for section in sections if section not in replaced]
    for group in ("recipe", *sections):
        paths = [folder / group / f"{tree.choices.get(group)}.yaml" for folder in tree.folders]
        path = next((path for path in paths if path.is_file()), None)
        written = load_yaml(path.read_text()) if path else None
        if not isinstance(written, dict):
            continue
        for section in sections if group == "recipe" else (group,):
            default = written.get(section) if group == "recipe" else written
            if isinstance(default, dict):
                typed_here = DATA_KEYS if section == "data" else ()
                default = {key: inner for key, inner in default.items() if key not in typed_here}
                _compare(default, values.get(section), section)


def _compare(default: Any, value: Any, key: str) -> None:
    """Refuse a value that is no number, truth or list where the file has one; a text in the file allows anything."""
    if isinstance(default, dict):
        if isinstance(value, Mapping):
            for name, inner in default.items():
                _compare(inner, value.get(name), f"{key}.{name}")
        return
    if value is None or default is None or isinstance(default, str) or facts.refers(value):
        return
    if isinstance(default, list):
        if not isinstance(value, list | tuple):
            suggestion = "" if isinstance(value, Mapping) else f"Type {key}=[{shown(value)}] for a list of one."
            raise RefusedError(f"is not a list (its default is {default})", key=key, value=value, suggestion=suggestion)
        if len({type(item) for item in default}) == 1:
            for index, item in enumerate(value):
                _compare(default[0], item, f"{key}[{index}]")
        return
    _compare_scalars(default, value, key)


def _compare_scalars(default: Any, value: Any, key: str) -> None:
    if isinstance(default, bool):
        kind = None if isinstance(value, bool) else "true or false"
    elif isinstance(value, str) and is_number(value):
        suggestion = f"Leave out the quotes: {key}={value}."
        raise RefusedError("is a text, and the key takes a number", key=key, value=f"'{value}'", suggestion=suggestion)
    elif isinstance(value, bool) or not isinstance(value, int | float):
        kind = "a number"
    else:
        kind = "a whole number" if isinstance(default, int) and isinstance(value, float) else None
    if kind:
        raise RefusedError(f"is not {kind} (its default is {shown(default)})", key=key, value=value)
