"""Compose the configuration of a command; whatever Hydra refuses becomes one sentence."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from ddpexp import __version__
from ddpexp.compat.hydra import VERSION_BASE
from ddpexp.compat.omegaconf import quick_yaml
from ddpexp.config.arguments import ONE_RUN, Arguments
from ddpexp.config.folders import LISTED, added_folder, conf_folder
from ddpexp.config.hydra_section import (
    check_not_typed,
)
from ddpexp.config.hydra_tree import SweepInFileError, compose_tree, sweep_in_file, without_inherited
from ddpexp.config.interpolations import bounded_interpolations
from ddpexp.config.override_checks import check_overrides
from ddpexp.config.plugins import plugin_folders, searched_packages
from ddpexp.config.sentences import one_sentence
from ddpexp.config.sweeps import Swept, compose_sweep
from ddpexp.config.values import Composed, Tree, finish
from ddpexp.errors import RefusedError


def compose_command(argv: list[str]) -> Composed | Swept | None:
    """Compose the run or the sweep of a command line; `hydra.mode` in a config file makes a sweep, too.

    Returns None after answering a question such as `--cfg job`.

    Raises:
        RefusedError: whatever Hydra or OmegaConf refuses.
    """
    arguments = Arguments.of(argv)
    if arguments.is_sweep:
        return compose_sweep(arguments)
    try:
        return _compose(arguments)
    except SweepInFileError:
        return compose_sweep(arguments)


def compose(argv: list[str]) -> Composed | None:
    """Compose one run. Returns None after answering a question such as `--cfg job`.

    Raises:
        RefusedError: whatever Hydra or OmegaConf refuses. SweepInFileError: a config file makes it a sweep.
    """
    return _compose(Arguments.of(argv))


def _compose(arguments: Arguments) -> Composed | None:
    if arguments.version:
        print(f"ddpexp {__version__}")
        return None
    if arguments.multirun and arguments.cfg:
        raise RefusedError(f"--cfg {arguments.cfg} shows one run: leave -m out, and give each key one value.")
    of_hydra = any(override.lstrip("+~").startswith("hydra") for override in arguments.overrides)
    may_sweep = of_hydra and (
        arguments.config_dir is not None or bool(searched_packages())
    )  # a config file may make it a sweep
    check_overrides(arguments.overrides, arguments.question, in_sweep=may_sweep)
    with one_sentence(), bounded_interpolations():
        if arguments.question:
            overrides = (
                without_inherited(arguments.overrides, added_folder(arguments.config_dir))
                if arguments.cfg
                else arguments.overrides
            )
            _let_hydra_answer([*arguments.options, *overrides])
            return None
        added = added_folder(arguments.config_dir)
        cfg = compose_tree(list(arguments.overrides), added)
        if cfg.hydra.mode == RunMode.MULTIRUN:
            raise sweep_in_file()
        for override in arguments.overrides:
            check_not_typed(override, in_sweep=False)
        of_sweeps = next((override for override in arguments.overrides if re.match(r"\+*sweep\.", override)), None)
        if of_sweeps is not None:
            raise RefusedError(f"{of_sweeps} is for sweeps: add -m, or leave it out.")
        typed = [override for override in arguments.overrides if not ONE_RUN.match(override)]
        unused = (
            ("hydra.sweeper.params in a config file is for sweeps: add -m",) if cfg.hydra.sweeper.get("params") else ()
        )
        composed = finish(Tree.of(cfg), typed, added)
        return replace(composed, warnings=(*composed.warnings, *unused))


def _let_hydra_answer(argv: list[str]) -> None:
    """Have Hydra's own main answer a question, which it prints."""
    arguments, sys.argv = sys.argv, ["ddpexp", *argv]
    try:
        with quick_yaml(), suppress(BrokenPipeError):  # the reader has gone (`| head`)
            hydra.main(config_path=str(conf_folder()), config_name="config", **VERSION_BASE)(lambda cfg: None)()
    finally:
        sys.argv = arguments


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
    check_overrides(list(overrides), False)
    with one_sentence(), bounded_interpolations(), quick_yaml():
        added = added_folder(directory)
        cfg = compose_tree(list(overrides), added)
        choices = {str(group): option for group, option in cfg.hydra.runtime.choices.items() if isinstance(option, str)}
        values = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(values, dict)
    of_hydra = {"sweep": {"dir": values.pop("hydra")["sweep"]["dir"]}}
    for group in LISTED:
        if group not in choices and values.get(group):  # Hydra does not name the options of a list
            choices[group] = ",".join(map(str, values[group]))
    values.setdefault("recipe", {}).setdefault("name", choices.get("recipe", "run"))
    folders = dict.fromkeys([conf_folder(), *([added] if added else []), *plugin_folders(), *searched_packages()])
    return Overview({str(key): value for key, value in values.items()}, of_hydra, choices, list(folders))
