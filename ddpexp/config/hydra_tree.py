"""Have Hydra compose the configuration tree from the files and overrides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from ddpexp.compat.hydra import VERSION_BASE
from ddpexp.compat.omegaconf import quick_yaml
from ddpexp.config.build import unknown_key
from ddpexp.config.file_targets import inherited_keys
from ddpexp.config.folders import LISTED, conf_folder, options
from ddpexp.config.hydra_section import (
    check_no_ignored_options,
    check_nothing_ignored,
)
from ddpexp.config.plugins import plugin_folders, searched_packages
from ddpexp.config.typed_targets import forced, is_in, keys_of_target, typed_targets
from ddpexp.config.user_files import check_user_files
from ddpexp.errors import RefusedError
from ddpexp.system.text import is_utf8


class SweepInFileError(RefusedError):
    """A config file turns a command into a sweep that its arguments do not request."""


def compose_tree(overrides: list[str], added: Path | None) -> DictConfig:
    """Compose the tree of one run, with Hydra's own section.

    Raises:
        RefusedError: a file or an override has a mistake. SweepInFileError: a config file makes this a sweep.
    """
    # Hydra's main composes twice, once to find out whether this is a sweep; its API composes once, in half the time.
    composed = without_inherited(overrides, added)
    with quick_yaml(), hydra.initialize_config_dir(str(conf_folder()), job_name="ddpexp", **VERSION_BASE):
        try:
            cfg = hydra.compose("config", [*_searched(added), *composed], return_hydra_config=True)
        except ConfigCompositionException as error:
            if re.match("Ambiguous value|Sweep parameters", str(error)) and _is_sweep_in_file(overrides, added):
                raise sweep_in_file() from None
            if gone := re.match(r"Could not delete from config\. '([^']+)' does not exist", str(error)):
                raise _nothing_to_delete(gone[1], overrides, added) from None
            raise
        check_settings_of_hydra(cfg, overrides, added)
        _drop_not_chosen(cfg, overrides, added)
        return cfg


def _drop_not_chosen(cfg: DictConfig, overrides: Sequence[str], added: Path | None) -> None:
    """Remove what a recipe sets of loggers and callbacks that are options and not chosen; what is typed stays."""
    for group in LISTED:
        section = cfg.get(group)
        if not isinstance(section, DictConfig):
            continue
        bare = [
            name
            for name, node in ((str(key), node) for key, node in section.items_ex(resolve=False))
            if isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation()
            if "_target_" not in node
            if not any(override.lstrip("+").startswith(f"{group}.{name}.") for override in overrides)
        ]
        if bare:
            known = options(
                group, [conf_folder(), *([added] if added else []), *plugin_folders(), *searched_packages()]
            )
            with open_dict(cfg):
                for name in set(bare) & set(known):
                    del section[name]


def compose_for_sweep(found: Hydra, overrides: list[str], added: Path | None) -> DictConfig:
    """Compose the tree of a sweep, in which overrides with several values are left to the jobs."""
    composed = forced(overrides, typed_targets(overrides))
    cfg = found.compose_config(
        "config",
        [*_searched(added), *composed],
        RunMode.MULTIRUN,
        with_log_configuration=False,
        validate_sweep_overrides=False,
    )
    cfg.hydra.overrides.task = overrides  # what sweepers read
    return cfg


def _searched(added: Path | None) -> list[str]:
    """Return the override that adds the user's and the plugins' folders to Hydra's search path."""
    folders = [*([added] if added else []), *plugin_folders()]
    for folder in folders:
        if not is_utf8(str(folder)):
            raise RefusedError(f"the path {folder} of an installed package is not UTF-8, and Hydra reads no other.")
        if "${" in str(folder):
            raise RefusedError(f"the path {folder} has ${{, which stands for a reference in configurations: rename it.")
    return [f"hydra.searchpath=[{','.join(_literal(f'file://{folder}') for folder in folders)}]"] if folders else []


def _literal(text: str) -> str:
    """Return a text as Hydra's grammar reads it: in quotes, with a backslash before each quote."""
    return '"{}"'.format(re.sub(r'(\\*)"', r'\1\1\\"', text))


def check_settings_of_hydra(cfg: DictConfig, overrides: list[str], added: Path | None) -> None:
    """Check what the user's files set in Hydra's own section; call it within `hydra.initialize_config_dir`."""
    folders = [*([added] if added else []), *plugin_folders(), *searched_packages()]
    if not folders:
        return

    chosen = [
        (str(group), option)
        for group, options in cfg.hydra.runtime.choices.items()
        for option in ([options] if isinstance(options, str) else options or ())  # several loggers are a list
    ]
    paths = [folder / group / f"{option}.yaml" for group, option in chosen for folder in folders]
    check_no_ignored_options([path for path in paths if path.is_file()])

    def files() -> list[Path]:
        return [path for path, _ in _composed_files(overrides, added) if not path.is_relative_to(conf_folder())]

    check_nothing_ignored(cfg, lambda: hydra.compose("config", _searched(added), return_hydra_config=True), files)


def _composed_files(overrides: Sequence[str], added: Path | None) -> list[tuple[Path, str]]:
    """Return the files of which a command is composed, in order, each with the package where its keys belong.

    Call it within `hydra.initialize_config_dir`.
    """
    folders = [conf_folder(), *([added] if added else []), *plugin_folders(), *searched_packages()]
    found = GlobalHydra.instance().config_loader()
    defaults = found.compute_defaults_list("config", [*_searched(added), *overrides], RunMode.MULTIRUN).defaults
    places = [(default, folder / f"{default.config_path}.yaml") for default in defaults for folder in folders]
    first = {id(default): (path, default.package or "") for default, path in reversed(places) if path.is_file()}
    return [first[id(default)] for default in defaults if id(default) in first]


def _nothing_to_delete(key: str, overrides: list[str], added: Path | None) -> RefusedError:
    """Return the error for a deletion that fails: no such key, or a null, which Hydra treats alike."""
    rest = [override for override in overrides if not override.startswith("~")]
    cfg = hydra.compose("config", [*_searched(added), *rest], return_hydra_config=True)
    parent, _, name = key.rpartition(".")
    section = OmegaConf.select(cfg, parent) if parent else cfg
    if isinstance(section, DictConfig) and name in section:
        return RefusedError(f"~{key}: its value is null, and there is nothing to remove: leave ~{key} out.")
    names = [str(child) for child in section if child != "hydra"] if isinstance(section, DictConfig) else []
    return unknown_key(name, names, parent)


def _is_sweep_in_file(overrides: list[str], added: Path | None) -> bool:
    found = GlobalHydra.instance().hydra
    assert found is not None
    return bool(compose_for_sweep(found, overrides, added).hydra.mode == RunMode.MULTIRUN)


def sweep_in_file() -> SweepInFileError:
    """Return the error of a config file that makes a command a sweep."""
    return SweepInFileError(
        "A config file sets hydra.mode=MULTIRUN, which makes this a sweep: add hydra.mode=RUN for one run."
    )


def without_inherited(overrides: Sequence[str], added: Path | None) -> list[str]:
    """Return overrides that also delete the keys which files give for another `_target_` than the one that counts.

    Raises:
        RefusedError: a file replaces the `_target_` of a typed option.
    """
    typed = typed_targets(overrides)
    surplus, replaced = _inherited_in_files(overrides, added)
    removed: dict[str, list[str]] = {}
    if typed:
        before = compose_tree([override for override in overrides if not is_in(override, typed)], added)
        for name, target in typed.items():
            node = OmegaConf.select(before, name)
            same = isinstance(node, DictConfig) and node.get("_target_") == target
            if not same and not is_in(f"{name}._target_", removed):
                removed[name] = keys_of_target(node, name)
    # Hydra cannot delete a null or an interpolation that does not resolve, so the key gets a plain value first.
    gone = [
        override
        for key in (*surplus, *(f"{name}.{key}" for name, keys in removed.items() for key in keys))
        for override in (f"++{key}=0", f"~{key}")
    ]
    return [
        *gone,
        *forced(
            [override for override in overrides if override[0] != "~" or not is_in(override, removed)],
            {*removed, *replaced},
        ),
    ]


def _inherited_in_files(overrides: Sequence[str], added: Path | None) -> tuple[list[str], set[str]]:
    """Return what `inherited_keys` finds in the files of the user and of packages."""
    if not (added or plugin_folders() or searched_packages()):
        return [], set()
    check_user_files(overrides, added)
    try:
        with quick_yaml(), hydra.initialize_config_dir(str(conf_folder()), job_name="ddpexp", **VERSION_BASE):
            files = _composed_files(overrides, added)
    except HydraException:  # composing reports it
        return [], set()
    return inherited_keys(files, {override.lstrip("+").partition("=")[0]: override for override in overrides})
