"""The arguments of the command that resumes a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ddpexp.run.directory import RunDir
from ddpexp.run.stored_config import parse_config
from ddpexp.system.files import check_yaml, shortest


def trust_arguments(run: RunDir) -> list[str]:
    """Return the arguments that trusted the run's code when it was started, as the run's files record them.

    Only for display, in the current folder: ddpexp never trusts a run directory's record of what code to run. Names
    that a package offered are among them, since it may be gone.
    """
    prefixes = _stored(run).get("trust")
    trusted = [f"run.trust=[{','.join(map(str, prefixes))}]"] if isinstance(prefixes, list) and prefixes else []
    return config_folder(run) + trusted


def typed_arguments(run: RunDir) -> list[str]:
    """Return what of these arguments was typed, for where the packages of the run are installed."""
    return config_folder(run) + [override for override in run.read_overrides() if _key(override) == "run.trust"]


def config_folder(run: RunDir) -> list[str]:
    """Return the option that names the user's config folder, if the run has one."""
    code = _stored(run).get("code")
    if not isinstance(code, str):
        return []
    options = config_options(run.command())
    name = Path(options[-1].partition("=")[2] or options[-1]).name if options else "conf"
    return ["--config-dir", shortest(Path(code) / name)]


def _stored(run: RunDir) -> Mapping[str, Any]:
    """Return the section `run` of the stored configuration; nothing if it cannot be read."""
    try:
        check_yaml(run.config)
        section = parse_config(run.config.read_text())["run"]
    except (OSError, ValueError, RecursionError, yaml.YAMLError, KeyError, TypeError):
        return {}
    return section if isinstance(section, Mapping) else {}


def config_options(argv: Sequence[str]) -> list[str]:
    """Return the options of a command line that name the user's config folder."""
    for position, argument in enumerate(argv):
        if argument in ("--config-dir", "-cd"):
            return list(argv[position : position + 2])
        if argument.startswith(("--config-dir=", "-cd=")):
            return [argument]
    return []


def merge_overrides(run: RunDir, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a run, updated with those of this command.

    run.allow_changes is dropped, since it holds for one start only.
    """
    keys = {"run.allow_changes", *map(_key, overrides)}
    return [override for override in run.read_overrides() if _key(override) not in keys] + list(overrides)


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]
