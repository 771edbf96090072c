"""Hydra composes the tree; its refusals become one sentence each, with the nearest right word."""

from __future__ import annotations

import copy
import os
import re
import sys
from argparse import ArgumentError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import getitem
from pathlib import Path
from typing import Any, cast

import hydra
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import Container, DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException
from omegaconf.resolvers import oc

from ddpexp import __version__
from ddpexp.config import DATA_KEYS
from ddpexp.config.build import did_you_mean, shown
from ddpexp.config.interpolations import bounded_interpolations
from ddpexp.config.plugins import plugin_folders
from ddpexp.config.quick_yaml import quick_yaml
from ddpexp.config.versions import VERSION_BASE, get_yaml_loader, register_resolver
from ddpexp.errors import RefusedError
from ddpexp.rundir import check_yaml

_FULL_ERROR = "HYDRA_FULL_ERROR"
_MODE = re.compile(r"\+*hydra\.mode=multirun$", re.IGNORECASE)
_NO_NAME = re.compile(r"[+-]?\d[\d_]*\.?\d*(e[+-]?\d+)?|true|false", re.IGNORECASE)  # what Hydra takes for no text
_VERBS = ("resume", "evaluate", "table", "status")
_OF_SWEEPS = re.compile(r"\+*hydra(\.sweep\.dir=|/sweeper\b|\.sweeper\b)")  # Hydra's settings that sweeps understand


@dataclass(frozen=True)
class Composed:
    """A composed configuration: plain values, and how it came to be."""

    values: Mapping[str, Any]  # resolved
    text: str  # YAML, resolved but for references to the environment, which may be secrets
    overrides: tuple[str, ...]  # as typed
    warnings: tuple[str, ...]


def conf_folder() -> Path:
    """Return the folder of our YAML files, in a checkout and in an installed wheel alike."""
    import ddpexp

    for place in ddpexp.__path__:
        if (Path(place) / "conf" / "config.yaml").is_file():
            return Path(place) / "conf"
    raise RefusedError("ddpexp's own configs (ddpexp/conf) are not installed: reinstall ddpexp.")


def compose(argv: list[str]) -> Composed | None:
    """Compose the tree from the command line; None when that was a question (`--help`, `--cfg`, ...), answered here.

    Raises:
        RefusedError: whatever Hydra or OmegaConf refuses.
    """
    if "--version" in argv:
        print(f"ddpexp {__version__}")
        return None
    words = _words(argv)
    for_hydra = _asks_hydra(words)
    if words.multirun and words.cfg:
        raise RefusedError(f"--cfg {words.cfg} shows one run: leave -m out, and give each key one value.")
    if words.help:  # of sweeps too
        words.overrides = [word for word in words.overrides if not _MODE.match(word)]
    _refuse_words(words.overrides, bool(for_hydra))
    with one_sentence(), bounded_interpolations():
        if words.help:
            print(_help(words.overrides, words.config_dir))
            return None
        if for_hydra:
            _let_hydra_answer([*(word for word in argv if word not in words.overrides), *words.overrides])
            return None
        of_sweeps = next((word for word in words.overrides if re.match(r"\+*sweep\.", word)), None)
        if of_sweeps is not None:
            raise RefusedError(f"{of_sweeps} is for sweeps: add -m, or leave it out.")
        added = _added(words.config_dir)
        return _composed(*_without_hydra(_hydra_composes(words.overrides, added)), words.overrides, added)


def is_sweep(argv: list[str]) -> bool:
    """Tell whether a command line asks for a sweep; not where it is a question, such as --help."""
    if {"--version", "--help", "-h"} & set(argv):
        return False
    words = _words(argv)
    return bool(words.multirun or any(map(_MODE.match, words.overrides))) and not _asks_hydra(words)


@dataclass(frozen=True)
class Swept:
    """A sweep as it was typed, before its jobs are known."""

    cfg: DictConfig  # composed without the words that sweep, and with Hydra's own section
    loader: ConfigLoader  # what Hydra's sweepers look groups up with
    settings: Mapping[str, Any]  # the section `sweep`
    keys: frozenset[str]  # that are swept
    words: tuple[str, ...]  # as typed
    folder: str | None  # hydra.sweep.dir, where it was typed
    config_dir: str | None
    warnings: tuple[str, ...]

    @property
    def sweeper(self) -> str:
        """Return which sweeper was chosen, as it is typed."""
        return f"hydra/sweeper={self.cfg.hydra.runtime.choices['hydra/sweeper']}"


def compose_sweep(argv: list[str]) -> Swept:
    """Compose what a sweep's jobs have in common.

    Raises:
        RefusedError: whatever Hydra or OmegaConf refuses, and Hydra's settings that would have no effect.
    """
    words = _words(argv)
    _asks_hydra(words)
    overrides = [word for word in words.overrides if not _MODE.match(word)]
    for word in overrides:
        _refuse_in_sweep(word)
    _refuse_words([word for word in overrides if not _OF_SWEEPS.match(word)], False)
    with (
        one_sentence(), bounded_interpolations(), quick_yaml(),
        hydra.initialize_config_dir(str(conf_folder()), **VERSION_BASE),
    ):  # fmt: skip
        found = GlobalHydra.instance().hydra
        assert found is not None
        parsed = OverridesParser.create(found.config_loader).parse_overrides(overrides)
        cfg = found.compose_config(
            "config", [*_searched(_added(words.config_dir)), *overrides], RunMode.MULTIRUN, with_log_configuration=False,
            validate_sweep_overrides=False,
        )  # fmt: skip
        of_sweeper = cfg.hydra.sweeper.get("params") or {}
        settings = OmegaConf.to_container(cfg.sweep, resolve=True)
        cfg.hydra.sweep.dir = str(cfg.hydra.sweep.dir)  # resolved here, where what is wrong with it becomes a sentence
    swept = {one.get_key_element() for one in parsed if one.is_sweep_override()}
    for key in swept:
        if re.match(r"\+*(sweep\.|hydra)", key):
            raise RefusedError(f"{key} is a setting of the sweep itself: give it one value.")
    assert isinstance(settings, dict)
    return Swept(
        cfg=cfg,
        loader=found.config_loader,
        settings={str(key): value for key, value in settings.items()},
        keys=frozenset({*swept, *map(str, of_sweeper)}),
        words=tuple(overrides),
        folder=next((word.partition("=")[2] for word in overrides if word.startswith("hydra.sweep.dir=")), None),
        config_dir=words.config_dir,
        warnings=_warnings(_added(words.config_dir)),
    )


class JobComposer:
    """Composes the jobs of a sweep; the files are read once for each choice of options, and values put into a copy."""

    def __init__(self, swept: Swept) -> None:
        """Take the sweep."""
        self._swept = swept
        self._bases: dict[tuple[str, ...], tuple[DictConfig, Mapping[str, str]]] = {}
        self._parser = OverridesParser.create(swept.loader)

    def compose(self, words: Sequence[str], run: Path) -> Composed:
        """Compose one job from all its words; it will lie in the directory `run`.

        Raises:
            RefusedError: whatever Hydra or OmegaConf refuses.
        """
        # What has a dot is the key of a value: groups are paths with slashes.
        values = [word for word in words if (key := word.partition("=")[0]) in self._swept.keys and re.match(r"\w+\.", key)]
        rest = tuple(word for word in words if word not in values)
        added = _added(self._swept.config_dir)
        with one_sentence(), bounded_interpolations():
            if rest not in self._bases:
                self._bases[rest] = _without_hydra(_hydra_composes(list(rest), added))
            cfg, choices = self._bases[rest]
            cfg = copy.deepcopy(cfg)
            ConfigLoaderImpl._apply_overrides_to_config(self._parser.parse_overrides(values), cfg)
            return _composed(cfg, choices, words, added, run)


def _asks_hydra(words: Namespace) -> bool:
    """Tell whether the words are a question to Hydra; refuse its options that do not apply."""
    if words.config_path or words.config_name or words.experimental_rerun:
        raise RefusedError("--config-path, --config-name and --experimental-rerun do not apply: use --config-dir DIR recipe=NAME.")
    return bool(words.hydra_help or words.cfg or words.info or words.shell_completion)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Make one sentence of what Hydra and OmegaConf refuse."""
    with _full_errors():
        try:
            yield
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
            if os.environ.get(_FULL_ERROR) == "asked":
                raise
            raise RefusedError(_sentence(error)) from None


def _refuse_in_sweep(word: str) -> None:
    key, _, value = word.lstrip("+~").partition("=")
    if key in ("sweep", "hydra.sweeper"):
        example = {"sweep": "sweep.slots=2", "hydra.sweeper": "hydra.sweeper.n_trials=20"}[key]
        raise RefusedError(f"{word}: {key} is a section: set its keys, such as {example}.")
    if key == "hydra/sweeper" and (value == "null" or _NO_NAME.fullmatch(value)):
        raise RefusedError(f"{word}: every sweep needs one, such as hydra/sweeper=basic, which is there when nothing is typed.")
    if key == "run.dir":
        raise RefusedError(f"{word}: every job of a sweep has a run directory of its own, right below hydra.sweep.dir=... .")
    if key == "hydra.sweep.subdir":
        raise RefusedError(f"{word}: the jobs' directories are named by their number and what is their own.")
    if key == "hydra/launcher" or key.startswith("hydra.launcher."):
        raise RefusedError(f"{word}: ddpexp starts the jobs of a sweep itself. sweep.slots=... says how many at once.")


def _words(argv: list[str]) -> Namespace:
    parser = get_args_parser()
    parser.exit_on_error = False  # its own way to refuse is a page of usage, of Hydra's flags
    try:
        words, unknown = parser.parse_known_intermixed_args(argv)  # options may stand anywhere
    except ArgumentError as error:
        raise RefusedError(f"{error}. --help shows what can be typed.") from None
    if unknown:
        raise RefusedError(f"{unknown[0]} is not an option: write key=value, for example trainer.gpus=2.")
    return words


def _refuse_words(overrides: list[str], question: bool) -> None:
    """Refuse what Hydra would take without effect, or answer with a traceback."""
    for word in overrides:
        key, _, value = word.lstrip("+~").partition("=")
        if not key:
            raise RefusedError(f"{word} is not an override: write key=value, for example trainer.gpus=2.")
        if re.match(r"hydra[./@]", key) and not question:
            raise RefusedError(f"{word}: Hydra's own settings have no effect here. Use run.dir=... and --config-dir DIR.")
        if value == "null" and key in _groups([conf_folder()]):
            raise RefusedError(f"{word}: every run needs one. Known here: {', '.join(_options(key, [conf_folder()]))}.")
        number = next((part for part in value.split(",") if _NO_NAME.fullmatch(part.strip())), None)
        if number is not None and key in _groups([conf_folder()]):
            raise RefusedError(f"{key}={number} is not a known option. Known here: {', '.join(_options(key, [conf_folder()]))}.")


def _groups(folders: list[Path]) -> list[str]:
    return sorted({path.parent.name for folder in folders for path in folder.glob("*/*.yaml")})


def _options(group: str, folders: list[Path]) -> list[str]:
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def _let_hydra_answer(argv: list[str]) -> None:
    arguments, sys.argv = sys.argv, ["ddpexp", *argv]
    try:
        with quick_yaml():
            hydra.main(config_path=str(conf_folder()), config_name="config", **VERSION_BASE)(lambda cfg: None)()
    finally:
        sys.argv = arguments


def _help(overrides: list[str], directory: str | None) -> str:
    # Hydra's own help copies its whole repository once for every option, which takes as long as all the rest.
    folders = [conf_folder(), *([Path(directory)] if directory else []), *plugin_folders()]
    cfg = _hydra_composes(overrides, _added(directory))
    header, footer = cfg.hydra.help.header, cfg.hydra.help.footer
    with open_dict(cfg):
        del cfg["hydra"]
    groups = "\n".join(f"{group}: {', '.join(_options(group, folders))}" for group in _groups(folders))
    return (
        f"{header}\n\n== Groups and their options (group=option) ==\n{groups}\n\n"
        f"== Every key of this command (key=value) ==\n{OmegaConf.to_yaml(cfg)}\n{footer}"
    )


def _added(directory: str | None) -> Path | None:
    added = Path(directory).resolve() if directory else None
    if added is not None and not added.is_dir():
        raise RefusedError(f"--config-dir {directory} is not a directory.")
    return added


def _hydra_composes(overrides: list[str], added: Path | None) -> DictConfig:
    # Hydra's own main composes twice, once to learn whether this is a sweep: the API does it once, in half the time.
    with quick_yaml(), hydra.initialize_config_dir(str(conf_folder()), **VERSION_BASE):
        return hydra.compose("config", [*_searched(added), *overrides], return_hydra_config=True)


def _searched(added: Path | None) -> list[str]:
    """Return the word that tells Hydra where else there are configs."""
    folders = [*([added] if added else []), *plugin_folders()]
    return [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in folders)}]"] if folders else []


def _without_hydra(cfg: DictConfig) -> tuple[DictConfig, Mapping[str, str]]:
    """Take Hydra's own section and that of sweeps out; return also which options of the groups were chosen."""
    choices = {str(group): option for group, option in cfg.hydra.runtime.choices.items() if isinstance(option, str)}
    with open_dict(cfg):
        del cfg["hydra"]
        del cfg["sweep"]
    return cfg, choices


def _composed(
    cfg: DictConfig, choices: Mapping[str, str], overrides: Sequence[str], added: Path | None, run: Path | None = None
) -> Composed:
    values, kept = _plain(cfg), _resolved_but_secrets(cfg)
    _refuse_untyped_trust(values, overrides)
    for tree in (values, kept):
        tree["run"]["code"] = str(added.parent) if added else None
        if run is not None:
            tree["run"]["dir"] = str(run)
        tree.setdefault("recipe", {}).setdefault("name", choices.get("recipe", "run"))
    _refuse_other_types(values, choices, [folder for folder in (conf_folder(), added) if folder is not None])
    return Composed(values, OmegaConf.to_yaml(OmegaConf.create(kept)), tuple(overrides), _warnings(added))


def _warnings(added: Path | None) -> tuple[str, ...]:
    return tuple(warning for folder in ([added] if added else []) + plugin_folders() for warning in _shadowed(folder))


@contextmanager
def _full_errors() -> Iterator[None]:
    """Make Hydra raise its errors instead of printing a traceback and leaving with 1."""
    previous = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "asked" if previous else "1"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = previous


def _resolved_but_secrets(cfg: DictConfig) -> dict[str, Any]:
    """Resolve the tree, but leave as written what reads the environment, directly or through other keys."""
    with _reads_of_environment() as reads:

        def kept(raw: Any, read: Callable[[], Any]) -> Any:
            if isinstance(raw, dict):
                return {str(key): kept(inner, partial(getitem, read(), key)) for key, inner in raw.items()}
            if isinstance(raw, list):
                return [kept(inner, partial(getitem, read(), index)) for index, inner in enumerate(raw)]
            if not isinstance(raw, str) or "${" not in raw:
                return raw
            reads.clear()
            value = read()
            plain = OmegaConf.to_container(value, resolve=True) if isinstance(value, Container) else value
            return raw if reads or "${" in str(plain) else plain

        tree: dict[str, Any] = kept(OmegaConf.to_container(cfg, resolve=False), lambda: cfg)
    return tree


@contextmanager
def _reads_of_environment() -> Iterator[list[str]]:
    """Collect the names that `${oc.env:NAME}` is asked for."""
    reads: list[str] = []

    def env(*arguments: str) -> Any:
        reads.append(arguments[0])
        return oc.env(*arguments)

    register_resolver("oc.env", env, replace=True)
    try:
        yield reads
    finally:
        register_resolver("oc.env", oc.env, replace=True)


def _plain(cfg: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    return {str(key): value for key, value in cast(dict[Any, Any], values).items()}


def _refuse_untyped_trust(values: Mapping[str, Any], typed: Sequence[str]) -> None:
    run = values.get("run")
    if not isinstance(run, Mapping):
        raise RefusedError(f"run={run} is not a section: set its keys, such as run.dir=... .")
    if run.get("trust") and not any(word.lstrip("+").startswith("run.trust=") for word in typed):
        raise RefusedError(f"run.trust={run['trust']} stands in a file: it counts only when typed on the command line.")
    if run.get("allow_changes") and not any(word.lstrip("+").startswith("run.allow_changes=") for word in typed):
        raise RefusedError(
            f"run.allow_changes={run['allow_changes']} stands in a file: it is for one start, so it counts only when typed on the "
            f"command line."
        )
    if run.get("code"):
        raise RefusedError(f"run.code={run['code']} cannot be set: type --config-dir DIR to use the code beside DIR.")


def _refuse_other_types(values: Mapping[str, Any], choices: Mapping[str, str], folders: list[Path]) -> None:
    """Compare the values of the sections that name an object with the types in the chosen option's own file.

    The other sections have fields with types, which `parse` holds against them.
    """
    sections = ("task", "model", "data", "optimizer")
    for group in ("recipe", *sections):
        paths = [folder / group / f"{choices.get(group)}.yaml" for folder in folders]
        path = next((path for path in paths if path.is_file()), None)
        written = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if path else None
        if not isinstance(written, dict):
            continue
        for section in sections if group == "recipe" else (group,):
            default = written.get(section) if group == "recipe" else written
            if isinstance(default, dict):
                typed_here = DATA_KEYS if section == "data" else ()
                _compare({key: inner for key, inner in default.items() if key not in typed_here}, values.get(section), section)


def _compare(default: Any, value: Any, key: str) -> None:
    """Refuse a number, a truth or a list that was one in the file and is none now; a text may stand for anything."""
    if isinstance(default, dict):
        if isinstance(value, Mapping):
            for name, inner in default.items():
                _compare(inner, value.get(name), f"{key}.{name}")
        return
    if value is None or default is None or isinstance(default, str):
        return
    if isinstance(default, list):
        if not isinstance(value, list | tuple):
            raise RefusedError(f"{key}={shown(value)} is not a list (its default is {default}).")
        if len({type(item) for item in default}) == 1:
            for index, item in enumerate(value):
                _compare(default[0], item, f"{key}[{index}]")
        return
    if isinstance(default, bool):
        kind = None if isinstance(value, bool) else "true or false"
    elif isinstance(value, bool) or not isinstance(value, int | float):
        kind = "a number"
    else:
        kind = "a whole number" if isinstance(default, int) and isinstance(value, float) else None
    if kind:
        raise RefusedError(f"{key}={shown(value)} is not {kind} (its default is {shown(default)}).")


def _shadowed(added: Path) -> Iterator[str]:
    """Warn of added options that our own of the same name hide: Hydra looks into our folder first."""
    ours = conf_folder()
    for path in sorted(added.glob("*/*.yaml")):
        name = path.relative_to(added)
        if (ours / name).is_file():
            yield f"{path} is not used: ddpexp has its own {name.with_suffix('')}. Give yours another name."


def _sentence(error: Exception) -> str:
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        if not group:
            return f"There is no config {option}."
        options = [name for name in error.options or _options(group, [conf_folder(), *plugin_folders()]) if name]
        known = did_you_mean(option, options, f"{group}=") if options else f" There is no group {group}."
        return f"{group}={option} is not a known option.{known}"
    if isinstance(error, OverrideParseException):
        if error.override in _VERBS:
            return f"{error.override} is a verb and stands first: python -m ddpexp {error.override} ... ."
        return f"{error.override} is not an override: write key=value, for example trainer.gpus=2."
    if isinstance(error, ConfigCompositionException):
        several = re.match(r"Ambiguous value for argument '([^']+)'", str(error))
        if several:
            return f"{several[1]} gives several values: add -m for a run with each, or write a list as key=[a,b]."
        unknown = re.match(r"Could not override '([^']+)'", str(error))
        if unknown and isinstance(error.__cause__, OmegaConfBaseException):
            return _unknown_key(unknown[1], error.__cause__)
        unmerged = re.match(r"Error merging override (.+)", str(error))
        if unmerged and isinstance(error.__cause__, OmegaConfBaseException):
            return f"{unmerged[1]}: {_first_line(error.__cause__)}."
        return _first_line(error)
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} is missing: give it a value, for example as {error.full_key}=... ."
    unset = re.search(r"Environment variable '(\w+)' not found", str(error))
    if unset and isinstance(error, OmegaConfBaseException):
        return f"{error.full_key} is read from the environment, and {unset[1]} is not set there: export {unset[1]}=... first."
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {_first_line(error)}"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}."
    if isinstance(error, UnicodeDecodeError):
        return f"A config file is not UTF-8 text: {error}."
    return _first_line(error)


def _unknown_key(typed: str, cause: OmegaConfBaseException) -> str:
    """Say which key is nearest to the typed one, at the level where it leaves the tree."""
    parent, key, full_key = cause.parent_node, str(cause.key), str(cause.full_key)
    if not isinstance(parent, DictConfig) or not full_key.endswith(key):
        return f"{typed} is not a known key."
    names = [str(name) for name in parent if name != "hydra"]
    return f"{typed} is not a known key.{did_you_mean(key, names, full_key[: -len(key)], typed[len(full_key) :])}"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith(("full_key:", "object_type=", "reference_type="))]
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", " ".join(said[:2])) or type(error).__name__


@bounded_interpolations()
@quick_yaml()
def override_file(path: Path, argv: list[str], goes_on: bool = False) -> tuple[Mapping[str, Any], str]:
    """Read a run directory's config.yaml and override it with `key=value` words; also return it as text.

    What the file says of whose code to trust does not count: run.trust and --config-dir are typed again. Nor does
    run.allow_changes, which was for the start that it was typed for. A run that `goes_on` keeps its launcher unless another one
    is typed, and may take other options of its groups.

    Raises:
        RefusedError: the file is damaged, or a word is no override of it.
    """
    words = _words(argv)
    try:
        check_yaml(path)
        cfg = OmegaConf.load(path)
    except (OSError, ValueError, OmegaConfBaseException, yaml.YAMLError) as error:
        raise RefusedError(f"{path} cannot be read: {_first_line(error)}.") from None
    if not isinstance(cfg, DictConfig) or not isinstance(cfg.get("run"), DictConfig):
        raise RefusedError(f"{path} is not the configuration of a run.")
    added = _added(words.config_dir)
    groups = _groups([folder for folder in (conf_folder(), added) if folder is not None]) if goes_on else ["launcher"]
    options = {key: name for key, _, name in (word.partition("=") for word in words.overrides) if key in groups}
    if not goes_on:
        options.setdefault("launcher", "spawn")  # how that run was started does not matter here
    for group, name in options.items():
        cfg[group] = _option(group, name, added)
    cfg.run.trust, cfg.run.code = [], str(added.parent) if added is not None else None
    cfg.run.allow_changes = []
    OmegaConf.set_struct(cfg, True)
    try:
        for word in words.overrides:
            if word.partition("=")[0] not in options:
                _override(cfg, word)
        return _plain(cfg), OmegaConf.to_yaml(cfg)
    except OmegaConfBaseException as error:
        raise RefusedError(f"{path}: {_sentence(error)}") from None


def _option(group: str, name: str, added: Path | None = None) -> DictConfig:
    folders = [conf_folder(), *([added] if added is not None else []), *plugin_folders()]
    options = _options(group, folders)
    if name not in options:
        raise RefusedError(f"{group}={name} is not a known option.{did_you_mean(name, options, f'{group}=')}")
    found = OmegaConf.load(
        next(folder / group / f"{name}.yaml" for folder in folders if (folder / group / f"{name}.yaml").is_file())
    )
    assert isinstance(found, DictConfig)
    if "defaults" in found or group == "recipe":
        raise RefusedError(f"{group}={name} is made of several files: type the whole command again, with run.dir=... .")
    return found


def _override(cfg: DictConfig, word: str) -> None:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise RefusedError(f"{word} is not an override: write key=value, for example trainer.gpus=2.")
    try:
        value = yaml.load(text, Loader=get_yaml_loader())
        if isinstance(OmegaConf.select(cfg, key), DictConfig):
            raise RefusedError(f"{word}: what the run was composed of stays; single keys can be changed, such as trainer.gpus=2.")
        OmegaConf.update(cfg, key, value, force_add=False)
    except yaml.YAMLError:
        raise RefusedError(f"{word} is not an override: its value is no YAML.") from None
    except (ConfigKeyError, ConfigAttributeError) as error:
        raise RefusedError(_unknown_key(key, error)) from None
