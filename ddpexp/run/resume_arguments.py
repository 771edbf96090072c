"""The arguments of the command that resumes a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ddpexp.config.keys import override_key
from ddpexp.config.restated import to_restate
from ddpexp.run.directory import RunDir
from ddpexp.run.stored_config import parse_config
from ddpexp.system.files import check_yaml, shortest
from ddpexp.system.secrets import resolved_references


def trust_arguments(run: RunDir) -> list[str]:
    """Return the arguments that trusted the run's code when it was started, as the run's files record them.

    Only for display, in the current folder: ddpexp never trusts a run directory's record of what code to run. Names
    that a package offered are among them, since it may be gone.
    """
    prefixes = _stored(run).get("trust")
    trusted = [f"run.trust=[{','.join(map(str, prefixes))}]"] if isinstance(prefixes, list) and prefixes else []
    return config_folder(run) + trusted


def typed_arguments(run: RunDir) -> list[str]:
    """Return what has to be typed of these arguments where the packages of the run are installed, and of its settings.

    Its config folder, which the run's files name, is not looked into.
    """
    return restated_arguments(config_folder(run), run.read_overrides(), _stored_tree(run), None)


def restated_arguments(
    options: Sequence[str], overrides: Sequence[str], tree: Mapping[str, Any], folder: Path | None
) -> list[str]:
    """Return the options that name a config folder, the overrides of run.trust, and those of settings to restate.

    `folder` is the config folder, if it is the user's own: what its files set need not be restated.
    """
    trust = [override for override in overrides if override_key(override) == "run.trust"]
    return [*options, *trust, *(setting.override for setting in to_restate(tree, folder))]


def names_to_trust(run: RunDir) -> list[str]:
    """Return the names of run.trust for the settings of a run that a command of this process has just accepted."""
    return [name for setting in to_restate(_stored_tree(run)) for name in setting.trusts]


def config_folder(run: RunDir) -> list[str]:
    """Return the option that names the user's config folder, if the run has one."""
    code = _stored(run).get("code")
    if not isinstance(code, str):
        return []
    folder = config_path(config_options(run.command()))
    return ["--config-dir", shortest(Path(resolved_references(code)) / (folder.name if folder is not None else "conf"))]


def _stored(run: RunDir) -> Mapping[str, Any]:
    """Return the section `run` of the stored configuration; nothing if it cannot be read."""
    section = _stored_tree(run).get("run")
    return section if isinstance(section, Mapping) else {}


def _stored_tree(run: RunDir) -> Mapping[str, Any]:
    """Return the stored configuration; nothing if it cannot be read."""
    try:
        check_yaml(run.config)
        tree = parse_config(run.config.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, Mapping) else {}


def config_options(argv: Sequence[str]) -> list[str]:
    """Return the options of a command line that name the user's config folder."""
    for position, argument in enumerate(argv):
        if argument in ("--config-dir", "-cd"):
            return list(argv[position : position + 2])
        if argument.startswith(("--config-dir=", "-cd=")):
            return [argument]
    return []


def config_path(options: Sequence[str]) -> Path | None:
    """Return the folder that these options name."""
    if not options:
        return None
    return Path(options[1] if len(options) > 1 else options[0].partition("=")[2]).expanduser()


def merge_overrides(run: RunDir, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a run, updated with those of this command.

    run.allow_changes is dropped, since it holds for one start only.
    """
    keys = {"run.allow_changes", *map(override_key, overrides)}
    return [override for override in run.read_overrides() if override_key(override) not in keys] + list(overrides)
