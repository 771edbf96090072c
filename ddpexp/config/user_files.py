"""Check a user's own YAML files for mistakes that Hydra accepts in silence, or reports about something else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ddpexp.config.build import nearest
from ddpexp.config.folders import LISTED, conf_folder, options, our_options
from ddpexp.config.plugins import plugin_folders
from ddpexp.config.schema import Experiment
from ddpexp.errors import RefusedError
from ddpexp.system.yaml_text import load_yaml

_CHOICE = re.compile(r"\+*([\w/]+)=([\w.,-]+)")  # an override that chooses an option of a group; a sweep, several
_HEADER = re.compile(r"(?:\s*#.*\n)*?\s*#\s*@package[ \t]+(\S+)")
_SPACELESS = re.compile(r"(\w+):([^\s:/].*)")  # `hidden:16`, which YAML reads as one text
_SPACELESS_LINE = re.compile(r"\s*(?:- +)?[A-Za-z_]\w*:[^\s:/]")
_ENTRY = re.compile(r"((?:override +)?/?[\w/]+) *([:=]) *([\w.-]+)")  # `override /model:net`, an entry that is a text


def check_user_files(overrides: Sequence[str], config_dir: Path | None) -> None:
    """Check the files in --config-dir that the overrides choose, and those that their defaults choose.

    Raises:
        RefusedError: one of them has a mistake; the sentence names the file and what to write.
    """
    if config_dir is None:
        return
    chosen = [match for override in overrides if (match := _CHOICE.fullmatch(override)) is not None]
    waiting = [(match[1], option) for match in chosen for option in match[2].split(",") if option]
    checked: set[Path] = set()
    while waiting:
        group, option = waiting.pop(0)
        name = f"{group}/{option.removesuffix('.yaml')}.yaml"
        path = config_dir / name
        if (conf_folder() / name).is_file() or path in checked:
            continue
        if not path.is_file():
            _check_folder_name(config_dir, group, option)
            continue
        checked.add(path)
        waiting += _check_file(path, group)


def _check_file(path: Path, group: str) -> list[tuple[str, str]]:
    """Check one file and return the options that its defaults choose, each with its group."""
    text = path.read_text(errors="replace")
    is_global = _check_header(path, text, group == "recipe")
    try:
        values = load_yaml(text)
    except yaml.MarkedYAMLError as error:
        _check_space_near(path, text, error)
        return []  # Hydra reports it
    except (ValueError, yaml.YAMLError):
        return []
    if not isinstance(values, dict):
        return []
    if is_global and "default" in values:
        raise RefusedError("has the unknown key default", suggestion="Did you mean defaults?", place=path)
    chosen = [*_check_defaults(path, values.get("defaults"))]
    sections = {key: value for key, value in values.items() if key != "defaults"}
    for key, value in sections.items() if is_global else ():
        _check_section(path, str(key), value)
    _check_spaces(path, sections)
    return chosen


def _check_header(path: Path, text: str, is_recipe: bool) -> bool:
    """Check the line `# @package` and return whether the file's keys count for the whole run."""
    if text.startswith("\ufeff"):
        raise RefusedError(
            "begins with a byte order mark, which Hydra does not read", suggestion="Save it as plain UTF-8.", place=path
        )
    header = _HEADER.match(text)
    if header is None:
        if is_recipe:
            raise RefusedError(
                "does not begin with the line # @package _global_, by which its keys count for the whole run",
                place=path,
            )
        return False
    package = header[1]
    if package != "_global_" and (is_recipe or nearest(package.strip("_"), ["global"]) is not None):
        raise RefusedError(
            f"begins with # @package {package}",
            suggestion="Write # @package _global_, by which its keys count for the whole run.",
            place=path,
        )
    return package == "_global_"


def _check_space_near(path: Path, text: str, error: yaml.MarkedYAMLError) -> None:
    """Refuse a key without a space after its colon where YAML stumbles over it, or over the line after it."""
    place = error.problem_mark.line if error.problem_mark is not None else 0
    lines = text.splitlines()
    for number in (place, place - 1):
        if 0 <= number < len(lines) and _SPACELESS_LINE.match(lines[number]):
            raise _no_space(f"{path}, line {number + 1}", lines[number].strip())


def _check_spaces(path: Path, values: Any) -> None:
    """Refuse keys such as `hidden:16`, which YAML reads as a text: in braces a key without a value, else a value."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            if value is None and _SPACELESS.fullmatch(str(key)):
                raise _no_space(str(path), str(key))
            _check_spaces(path, value)
    elif isinstance(values, list):
        for value in values:
            _check_spaces(path, value)


def _no_space(where: str, text: str) -> RefusedError:
    suggestion = f"Write {re.sub(':', ': ', text, count=1)}."
    return RefusedError(f"The line {text} needs a space after the colon", suggestion=suggestion, place=where)


def _check_defaults(path: Path, defaults: Any) -> Iterator[tuple[str, str]]:
    """Check the list of defaults and yield the options that it chooses."""
    if defaults is None:
        return
    if not isinstance(defaults, list):
        raise RefusedError(
            "has no list under defaults",
            suggestion="Write each entry after a dash, as in - override /model: net.",
            place=path,
        )
    for entry in defaults:
        if isinstance(entry, str) and (match := _ENTRY.fullmatch(entry)) is not None:
            missing = "a space after the colon" if match[2] == ":" else "a colon in place of ="
            raise RefusedError(
                f"The entry - {entry} needs {missing}", suggestion=f"Write - {match[1]}: {match[3]}.", place=path
            )
        for key, option in entry.items() if isinstance(entry, dict) else ():
            yield from _check_entry(path, str(key), option)


def _check_entry(path: Path, key: str, option: Any) -> Iterator[tuple[str, str]]:
    typed = re.fullmatch(r"(override +)?(/?)([\w/]+?)(@[\w.]+)?", key.strip())
    if typed is None:
        return
    group, ours = typed[3], our_options()
    if group in ours and isinstance(option, list) and group not in LISTED:
        raise RefusedError(
            f"The entry - {key}: [{', '.join(map(str, option))}] chooses several options, and a run has one",
            suggestion=f"Write one of them, and -m {group}={','.join(map(str, option))} on the command line "
            "for a run with each.",
            place=path,
        )
    near = nearest(group, ours, 0.8)
    if near is not None and near != group and not (path.parent.parent / group).is_dir():
        raise RefusedError(
            f"There is no group {group}", suggestion=f"Did you mean - {typed[1] or ''}/{near}: {option}?", place=path
        )
    for name in option if isinstance(option, list) else [option]:
        if isinstance(name, str) and (typed[2] or typed[1]):
            yield group, name


def _check_section(path: Path, key: str, value: Any) -> None:
    """Check what stands at a top-level key of a file whose keys count for the whole run."""
    if key not in Experiment.__dataclass_fields__:
        return
    if value is None:
        raise RefusedError(
            f"sets {key} to nothing",
            suggestion=f"Write its keys below it, indented, or leave the line {key}: out.",
            place=path,
        )
    if not isinstance(value, str):
        return
    if _SPACELESS.fullmatch(value):
        raise _no_space(str(path), value)
    if key in our_options() and re.fullmatch(r"[\w-]+", value):
        raise RefusedError(
            f"has {key}: {value} in place of the section {key}",
            suggestion=f"Choose an option under defaults, as - override /{key}: {value}.",
            place=path,
        )


def _check_folder_name(config_dir: Path, group: str, option: str) -> None:
    """Refuse a folder such as `models` that holds the option which is looked for in `model`."""
    if option in options(group, [conf_folder(), *plugin_folders()]):
        return
    ours = our_options()
    for path in sorted(config_dir.glob(f"*/{option.removesuffix('.yaml')}.yaml")):
        folder = path.parent
        if group in ours and folder.name not in ours and nearest(folder.name, ours, 0.8) == group:
            raise RefusedError(
                f"is not the folder of {group}={option}", suggestion=f"Rename it to {config_dir / group}.", place=folder
            )
