"""Compose the tree of a command: the only module that composes with Hydra."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ddpexp.compat.hydra import VERSION_BASE, apply_overrides, own_globals, quick_defaults
from ddpexp.compat.omegaconf import quick_yaml
from ddpexp.config import sentences
from ddpexp.config.arguments import Arguments
from ddpexp.config.build import unknown_key
from ddpexp.config.folders import LISTED, conf_folder, config_dir_of, options
from ddpexp.config.habits import answer, answer_to
from ddpexp.config.hydra_section import check_files
from ddpexp.config.instantiate import targets
from ddpexp.config.interpolations import bounded_interpolations
from ddpexp.config.override_syntax import unread
from ddpexp.config.plugins import package_folder, plugin_folders
from ddpexp.config.replaced_targets import typed_targets, with_plus_plus, without_inherited
from ddpexp.config.user_files import check_user_files
from ddpexp.errors import RefusedError
from ddpexp.system.text import is_utf8


class SweepInFileError(RefusedError):
    """A config file turns a command into a sweep that its arguments do not request."""


@dataclass(frozen=True)
class Tree:
    """A composed configuration: plain values, whose references are not resolved."""

    values: Mapping[str, Any]  # by section; `sweep` is one of them
    hydra: Mapping[str, Any]  # Hydra's own section
    overrides: tuple[str, ...]  # as typed
    config_dir: Path | None
    folders: Sequence[Path]  # that hold the options of groups, in the order of precedence; ours is first
    packages: Mapping[Path, str]  # folders that packages have Hydra search, each with its top-level package

    @property
    def choices(self) -> dict[str, str]:
        """The chosen option of each group."""
        chosen = self.hydra["runtime"]["choices"].items()
        return {str(group): option.removesuffix(".yaml") for group, option in chosen if isinstance(option, str)}

    def check_is_one_run(self) -> None:
        """Raise SweepInFileError if a config file makes it a sweep."""
        if self.hydra["mode"] == RunMode.MULTIRUN.name:
            raise _sweep_in_file()


@dataclass(frozen=True)
class SweepTree:
    """What the jobs of a sweep have in common, and what of its overrides is left to the jobs."""

    tree: Tree
    swept: frozenset[str]  # the keys of overrides that are swept
    keys: frozenset[str]  # with those that a config file sweeps
    intervals: tuple[str, ...]  # overrides with a range of values to choose from
    trust: tuple[str, ...]  # the prefixes of run.trust
    cfg: DictConfig  # the tree as Hydra's sweepers take it
    loader: ConfigLoader  # in which they look up groups


def compose_tree(overrides: Sequence[str], config_dir: Path | None) -> Tree:
    """Compose the tree of one run.

    Raises:
        RefusedError: a file or an override has a mistake. SweepInFileError: a config file makes this a sweep.
    """
    check_user_files(overrides, config_dir)
    with _opened(config_dir) as files:
        chosen = files.chosen(overrides)
        try:
            values = files.compose(without_inherited(overrides, chosen, files.compose))
        except ConfigCompositionException as error:
            _explain(error, files, overrides)
            raise
        check_files(chosen)
    tree = Tree(values, values.pop("hydra"), tuple(overrides), config_dir, files.folders, files.packages)
    return replace(tree, values=_without_unchosen(tree))


def compose_sweep_tree(overrides: Sequence[str], config_dir: Path | None) -> SweepTree:
    """Compose what the jobs of a sweep have in common; overrides with several values are left to the jobs.

    Raises:
        RefusedError: a file or an override has a mistake.
    """
    check_user_files(overrides, config_dir)
    with _opened(config_dir) as files:
        parser = OverridesParser.create(files.loader)
        typed = parser.parse_overrides(list(overrides))
        composed = [*files.search, *with_plus_plus(overrides, typed_targets(overrides))]
        try:
            cfg = files.loader.load_configuration(
                "config", composed, RunMode.MULTIRUN, False, validate_sweep_overrides=False
            )
        except ConfigCompositionException as error:
            _answer_habit(error, overrides)
            raise
        cfg.hydra.overrides.task = list(overrides)  # what sweepers read
        values: Any = OmegaConf.to_container(cfg, resolve=False, enum_to_str=True)
        section = values.pop("hydra")
        check_files(files.chosen(overrides))
        params = section["sweeper"].get("params") or {}
        of_file = parser.parse_overrides([f"{key}={value}" for key, value in params.items()])
        trust = [override.value() for override in typed if override.get_key_element().lstrip("+") == "run.trust"]
        swept = [override.get_key_element() for override in typed if override.is_sweep_override()]
        intervals = [str(override.input_line) for override in (*typed, *of_file) if override.is_interval_sweep()]
    return SweepTree(
        tree=Tree(values, section, tuple(overrides), config_dir, files.folders, files.packages),
        swept=frozenset(swept),
        keys=frozenset({*swept, *map(str, params)}),
        intervals=tuple(intervals),
        trust=tuple(map(str, trust[-1])) if trust and isinstance(trust[-1], list) else (),
        cfg=cfg,
        loader=files.loader,
    )


def with_values(tree: Tree, overrides: Sequence[str]) -> Tree:
    """Set values in a tree, without reading its files again.

    Raises:
        RefusedError: a key or a value is wrong.
    """
    cfg = OmegaConf.create(dict(tree.values))
    OmegaConf.set_struct(cfg, True)
    with refuse_hydra_errors(), bounded_interpolations():
        apply_overrides(OverridesParser.create().parse_overrides(list(overrides)), cfg)
    return replace(tree, values=cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False)))


def ask_hydra(arguments: Arguments) -> None:
    """Have Hydra's own main print what an option such as --cfg asks for.

    Raises:
        RefusedError: a file or an override has a mistake.
    """
    overrides: Sequence[str] = arguments.overrides
    if arguments.cfg:
        config_dir = config_dir_of(arguments.config_dir)
        check_user_files(overrides, config_dir)
        with _opened(config_dir) as files:
            overrides = without_inherited(overrides, files.chosen(overrides), files.compose)
    with refuse_hydra_errors(), bounded_interpolations(), quick_yaml(), _as_program([*arguments.options, *overrides]):
        hydra.main(config_path=str(conf_folder()), config_name="config", **VERSION_BASE)(lambda cfg: None)()


@contextmanager
def _as_program(arguments: Sequence[str]) -> Iterator[None]:
    """Have Hydra's main read these arguments, and raise its errors instead of printing them and exiting."""
    argv, sys.argv = sys.argv, ["ddpexp", *arguments]
    is_set = sentences.FULL_ERROR in os.environ
    os.environ.setdefault(sentences.FULL_ERROR, "1")
    try:
        with suppress(BrokenPipeError):  # the reader has gone (`| head`)
            yield
    finally:
        sys.argv = argv
        if not is_set:
            del os.environ[sentences.FULL_ERROR]


def searched_packages() -> dict[Path, str]:
    """Return the folders that installed packages have Hydra search, each with its top-level package."""
    with _opened(None) as files:
        return files.packages


def sweeper_targets() -> set[str]:
    """Return the names that Hydra and its plugins have registered for sweeps."""

    def walk(tree: Any) -> Iterator[str]:
        for value in tree.values():
            if isinstance(value, dict):
                yield from walk(value)
            elif OmegaConf.is_config(value.node):
                yield from (str(target) for _, target in targets(OmegaConf.to_container(value.node, resolve=False), ""))

    return set(walk(ConfigStore.instance().repo["hydra"]["sweeper"]))


# Hydra's errors


@contextmanager
def refuse_hydra_errors() -> Iterator[None]:
    """Convert errors of Hydra to RefusedError, and those of OmegaConf and PyYAML."""
    try:
        with sentences.one_sentence():
            yield
    except HydraException as error:
        if os.environ.get(sentences.FULL_ERROR):
            raise
        raise _refusal(error) from None


def _refusal(error: HydraException) -> RefusedError:
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return sentences.unknown_option(error.missing_cfg_file, error.options, str(error))
    if isinstance(error, OverrideParseException):
        return unread(str(error.override), _is_read)
    if isinstance(error, ConfigCompositionException):
        return sentences.composition(str(error), error.__cause__)
    return RefusedError(sentences.first_line(error))


def _is_read(override: str) -> bool:
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return False
    return True


def _sweep_in_file() -> SweepInFileError:
    return SweepInFileError(
        "A config file sets hydra.mode=MULTIRUN, which makes this a sweep", suggestion="Add hydra.mode=RUN for one run."
    )


# The files


@dataclass(frozen=True)
class _Files:
    """The files that Hydra composes."""

    loader: ConfigLoader
    folders: Sequence[Path]  # in the order of precedence; ours is first
    packages: dict[Path, str]  # those that Hydra searches by itself
    search: Sequence[str]  # the override that adds the others

    def compose(self, overrides: Sequence[str], mode: RunMode = RunMode.RUN) -> dict[str, Any]:
        """Compose the whole tree, with Hydra's section, as plain values whose references are not resolved."""
        typed, is_run = [*self.search, *overrides], mode == RunMode.RUN
        cfg = self.loader.load_configuration("config", typed, mode, False, validate_sweep_overrides=is_run)
        return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False, enum_to_str=True))

    def chosen(self, overrides: Sequence[str]) -> list[tuple[Path, str]]:
        """Return the files that overrides choose, in order, each with the package where its keys belong.

        Empty if only ddpexp's own folder is searched, or if Hydra rejects the overrides, which composing reports.
        """
        if len(self.folders) == 1:
            return []
        try:
            composed = self.loader.compute_defaults_list("config", [*self.search, *overrides], RunMode.MULTIRUN)
        except HydraException:
            return []
        files = []
        for default in composed.defaults:
            paths = [folder / f"{default.config_path}.yaml" for folder in self.folders]
            files += [(path, default.package or "") for path in paths if path.is_file()][:1]
        return files


@contextmanager
def _opened(config_dir: Path | None) -> Iterator[_Files]:
    """Start Hydra for our files, those of a --config-dir and those of packages, without the caller's own Hydra."""
    others = [*([config_dir] if config_dir else []), *plugin_folders()]
    _check_paths(others)
    search = [f"hydra.searchpath=[{','.join(_literal(f'file://{folder}') for folder in others)}]"] if others else []
    with (
        refuse_hydra_errors(), bounded_interpolations(), quick_yaml(), quick_defaults(), own_globals(),
        hydra.initialize_config_dir(str(conf_folder()), job_name="ddpexp", **VERSION_BASE),
    ):  # fmt: skip
        loader = GlobalHydra.instance().config_loader()
        packages = _packages(loader)
        yield _Files(loader, list(dict.fromkeys([conf_folder(), *others, *packages])), packages, search)


def _packages(loader: ConfigLoader) -> dict[Path, str]:
    """Return the folders that SearchPathPlugins add, each with its top-level package; outside of any with none."""
    folders: dict[Path, str] = {}
    for element in loader.get_search_path().get_path():
        if element.provider in ("hydra", "main", "schema"):
            continue
        scheme, separator, name = (element.path or "").rpartition("://")
        if scheme == "pkg":
            root, paths = package_folder(name)
            folders |= dict.fromkeys(paths, root)
        elif scheme in ("", "file") and (separator or name) and Path(name).is_dir():
            folders[Path(name)] = ""
    return folders


def _check_paths(folders: Sequence[Path]) -> None:
    for folder in folders:
        if not is_utf8(str(folder)):
            raise RefusedError("is not UTF-8, and Hydra reads no other path", place=f"the package folder {folder}")
        if "${" in str(folder):
            raise RefusedError(
                "has ${, which stands for a reference in configurations",
                suggestion="Rename it.",
                place=f"the path {folder}",
            )


def _literal(text: str) -> str:
    """Return a text as Hydra's grammar reads it: in quotes, with a backslash before each quote."""
    return '"{}"'.format(re.sub(r'(\\*)"', r'\1\1\\"', text))


# Composing


def _explain(error: ConfigCompositionException, files: _Files, overrides: Sequence[str]) -> None:
    """Raise a better error than Hydra's where there is one."""
    if re.match("Ambiguous value|Sweep parameters", str(error)):
        typed = with_plus_plus(overrides, typed_targets(overrides))
        if files.compose(typed, RunMode.MULTIRUN)["hydra"]["mode"] == RunMode.MULTIRUN.name:
            raise _sweep_in_file() from None
    _answer_habit(error, overrides)
    if absent := re.match(r"Could not delete from config\. '([^']+)' does not exist", str(error)):
        raise _nothing_to_delete(files, absent[1], overrides) from None


def _answer_habit(error: ConfigCompositionException, overrides: Sequence[str]) -> None:
    """Raise a better error than Hydra's for a key or an option of another framework."""
    missing = error.missing_cfg_file if isinstance(error, MissingConfigException) else None
    if missing is not None and answer([option := "=".join(missing.rsplit("/", 1))]):
        group, _, name = option.partition("=")
        suggestion = answer_to(option, overrides)
        raise RefusedError("is not a known option", key=group, value=name, suggestion=suggestion) from None
    unknown = re.match(r"Could not override '([^']+)'(?!\. No match in the defaults list)", str(error))
    typed = [override for override in overrides if unknown and override.lstrip("+").partition("=")[0] == unknown[1]]
    if unknown is not None and answer(typed):
        suggestion = answer_to(typed[0], overrides)
        raise RefusedError("is not a known key", key=unknown[1], suggestion=suggestion) from None


def _nothing_to_delete(files: _Files, key: str, overrides: Sequence[str]) -> RefusedError:
    """Return the error for a deletion that fails: no such key, or a null, which Hydra treats alike."""
    section: Any = files.compose([override for override in overrides if not override.startswith("~")])
    *parents, name = key.split(".")
    for parent in parents:
        section = section.get(parent) if isinstance(section, Mapping) else None
    if isinstance(section, Mapping) and name in section:
        return RefusedError(
            "Its value is null, and there is nothing to remove", suggestion=f"Leave ~{key} out.", place=f"~{key}"
        )
    names = [str(child) for child in section if child != "hydra"] if isinstance(section, Mapping) else []
    return unknown_key(name, names, ".".join(parents))


def _without_unchosen(tree: Tree) -> dict[str, Any]:
    """Return the values without what a recipe sets of loggers and callbacks that are options and not chosen."""
    values = dict(tree.values)
    for group in LISTED:
        section = values.get(group)
        if not isinstance(section, Mapping):
            continue
        bare = [
            name
            for name, node in section.items()
            if isinstance(node, Mapping) and "_target_" not in node
            if not any(override.lstrip("+").startswith(f"{group}.{name}.") for override in tree.overrides)
        ]
        if bare:
            unchosen = set(bare) & set(options(group, tree.folders))
            values[group] = {name: node for name, node in section.items() if name not in unchosen}
    return values
