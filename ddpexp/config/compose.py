"""Hydra composes the tree; its refusals become one sentence each, with the nearest right word."""

from __future__ import annotations

import os
import re
import signal
import sys
from argparse import ArgumentError, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import getitem
from pathlib import Path
from typing import Any, cast

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import Container, DictConfig, OmegaConf, open_dict
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException
from omegaconf.resolvers import oc

from ddpexp import __version__
from ddpexp.config import DATA_KEYS
from ddpexp.config.build import did_you_mean, shown
from ddpexp.config.plugins import plugin_folders
from ddpexp.errors import RefusedError
from ddpexp.rundir import check_yaml

_FULL_ERROR = "HYDRA_FULL_ERROR"


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
    if words.multirun or any(word.lstrip("+").lower().startswith("hydra.mode=multirun") for word in words.overrides):
        raise RefusedError("Sweeps (-m, --multirun) are not there yet: start one run at a time.")
    if words.config_path or words.config_name or words.experimental_rerun:
        raise RefusedError("--config-path, --config-name and --experimental-rerun do not apply: use --config-dir DIR recipe=NAME.")
    for_hydra = words.hydra_help or words.cfg or words.info or words.shell_completion
    _refuse_words(words.overrides, bool(for_hydra))
    with _signals_wait(), _full_errors():
        try:
            if words.help:
                print(_help(words.overrides, words.config_dir))
                return None
            if for_hydra:
                _let_hydra_answer([*(word for word in argv if word not in words.overrides), *words.overrides])
                return None
            return _composed(words.overrides, words.config_dir)
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
            if os.environ.get(_FULL_ERROR) == "asked":
                raise
            raise RefusedError(_sentence(error)) from None


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


def _groups(folders: list[Path]) -> list[str]:
    return sorted({path.parent.name for folder in folders for path in folder.glob("*/*.yaml")})


def _options(group: str, folders: list[Path]) -> list[str]:
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def _let_hydra_answer(argv: list[str]) -> None:
    arguments, sys.argv = sys.argv, ["ddpexp", *argv]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")(lambda cfg: None)()
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
    folders = [*([added] if added else []), *plugin_folders()]
    search = [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in folders)}]"] if folders else []
    with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
        return hydra.compose("config", [*search, *overrides], return_hydra_config=True)


def _composed(overrides: list[str], directory: str | None) -> Composed:
    added = _added(directory)
    cfg = _hydra_composes(overrides, added)
    choices = {str(group): option for group, option in cfg.hydra.runtime.choices.items() if isinstance(option, str)}
    with open_dict(cfg):
        del cfg["hydra"]
    values, kept = _plain(cfg), _resolved_but_secrets(cfg)
    _refuse_untyped_trust(values, overrides)
    for tree in (values, kept):
        tree["run"]["code"] = str(added.parent) if added else None
        tree.setdefault("recipe", {}).setdefault("name", choices.get("recipe", "run"))
    _refuse_other_types(values, choices, [folder for folder in (conf_folder(), added) if folder is not None])
    warnings = [warning for folder in ([added] if added else []) + plugin_folders() for warning in _shadowed(folder)]
    return Composed(values, OmegaConf.to_yaml(OmegaConf.create(kept)), tuple(overrides), tuple(warnings))


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Let stop signals wait until Hydra is done: OmegaConf would make an error of its own of what their handler raises."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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

    OmegaConf.register_new_resolver("oc.env", env, replace=True)
    try:
        yield reads
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _plain(cfg: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    return {str(key): value for key, value in cast(dict[Any, Any], values).items()}


def _refuse_untyped_trust(values: Mapping[str, Any], typed: list[str]) -> None:
    run = values.get("run")
    if not isinstance(run, Mapping):
        raise RefusedError(f"run={run} is not a section: set its keys, such as run.dir=... .")
    if run.get("trust") and not any(word.lstrip("+").startswith("run.trust=") for word in typed):
        raise RefusedError(f"run.trust={run['trust']} stands in a file: it counts only when typed on the command line.")
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
        return f"{error.override} is not an override: write key=value, for example trainer.gpus=2."
    if isinstance(error, ConfigCompositionException):
        several = re.match(r"Ambiguous value for argument '([^']+)'", str(error))
        if several:
            return f"{several[1]} gives several values: start one run at a time, or write a list as key=[a,b]."
        unknown = re.match(r"Could not override '([^']+)'", str(error))
        if unknown and isinstance(error.__cause__, OmegaConfBaseException):
            return _unknown_key(unknown[1], error.__cause__)
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


@_signals_wait()
def override_file(path: Path, argv: list[str], goes_on: bool = False) -> tuple[Mapping[str, Any], str]:
    """Read a run directory's config.yaml and override it with `key=value` words; also return it as text.

    What the file says of whose code to trust does not count: run.trust and --config-dir are typed again. A run that `goes_on`
    keeps its launcher unless another one is typed, and may take other options of its groups.

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
