"""Compose the configuration of a command: arguments -> tree (Hydra) -> resolved values, a typed value between each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddpexp import __version__
from ddpexp.config.all_mistakes import with_all_mistakes
from ddpexp.config.arguments import ONE_RUN, Arguments
from ddpexp.config.folders import LISTED, config_dir_of
from ddpexp.config.hydra_section import check_of_one_run
from ddpexp.config.override_checks import check_overrides
from ddpexp.config.resolve import ResolvedConfig, resolve
from ddpexp.config.sweeps import Swept, compose_sweep
from ddpexp.config.tree import SweepInFileError, ask_hydra, compose_tree


def compose_command(argv: Sequence[str]) -> ResolvedConfig | Swept | None:
    """Compose the run or the sweep of a command line; `hydra.mode` in a config file makes a sweep, too.

    Returns None after printing what an option such as `--cfg job` asks for.

    Raises:
        RefusedError: whatever Hydra or OmegaConf refuses.
    """
    arguments = Arguments.of(argv)
    if arguments.version:
        print(f"ddpexp {__version__}")
        return None
    if arguments.only_prints:
        check_overrides(arguments.overrides, only_prints=True)
        ask_hydra(arguments)
        return None
    if arguments.is_sweep:
        return compose_sweep(arguments)
    try:
        return compose_run(arguments)
    except SweepInFileError:
        return compose_sweep(arguments)


def compose(argv: Sequence[str]) -> ResolvedConfig:
    """Compose one run.

    Raises:
        RefusedError: whatever Hydra or OmegaConf refuses. SweepInFileError: a config file makes it a sweep.
    """
    return compose_run(Arguments.of(argv))


def compose_run(arguments: Arguments) -> ResolvedConfig:
    """Compose the run of a command.

    Raises:
        RefusedError: whatever Hydra or OmegaConf refuses. SweepInFileError: a config file makes it a sweep.
    """
    return with_all_mistakes(_compose_run, arguments)


def _compose_run(arguments: Arguments) -> ResolvedConfig:
    check_overrides(arguments.overrides)
    tree = compose_tree(arguments.overrides, config_dir_of(arguments.config_dir))
    tree.check_is_one_run()
    check_of_one_run(arguments.overrides)
    typed = tuple(override for override in arguments.overrides if not ONE_RUN.match(override))
    composed = resolve(replace(tree, overrides=typed))
    if tree.hydra["sweeper"].get("params"):
        unused = "hydra.sweeper.params in a config file is for sweeps: add -m"
        return replace(composed, warnings=(*composed.warnings, unused))
    return composed


@dataclass(frozen=True)
class Overview:
    """What some overrides compose, for the help and the completion."""

    values: Mapping[str, Any]  # the tree, interpolations unresolved
    of_hydra: Mapping[str, Any]  # the keys of Hydra's own section that sweeps support
    choices: Mapping[str, str]  # which option of each group was chosen; several, as loggers, with commas between them
    folders: Sequence[Path]  # that hold the groups, in the order of precedence; ours is first


def overview(overrides: Sequence[str], directory: str | None) -> Overview:
    """Compose the tree for explaining it, not for a run.

    Raises:
        RefusedError: whatever Hydra or OmegaConf refuses.
    """
    check_overrides(overrides)
    tree = compose_tree(overrides, config_dir_of(directory))
    values, choices = dict(tree.values), tree.choices
    for group in LISTED:
        if group not in choices and values.get(group):  # Hydra does not name the options of a list
            choices[group] = ",".join(map(str, values[group]))
    values["recipe"] = {"name": choices.get("recipe", "run"), **(values.get("recipe") or {})}
    return Overview(values, {"sweep": {"dir": tree.hydra["sweep"]["dir"]}}, choices, tree.folders)
