"""Hydra composes the tree; its refusals become one sentence each, with the nearest right word."""

from __future__ import annotations

import copy
import os
import re
import shlex
import sys
from argparse import ArgumentError, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import getitem
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import hydra
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import Container, DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from omegaconf.resolvers import oc

from ddpexp import __version__
from ddpexp.config.build import did_you_mean, nearest, shown, unknown_key
from ddpexp.config.folders import added_folder, conf_folder, groups, options
from ddpexp.config.foreign import advice_on_key
from ddpexp.config.hydra_section import (
    answered,
    answers_of,
    check_code_of_sweeper,
    check_no_ignored_options,
    check_not_typed,
    check_nothing_ignored,
    dirname,
    written_out,
)
from ddpexp.config.instantiate import Trust
from ddpexp.config.interpolations import bounded_interpolations
from ddpexp.config.kinds import several, takes_number
from ddpexp.config.names import check_present, named
from ddpexp.config.plugins import offered_targets, plugin_folders, searched_packages
from ddpexp.config.quick_yaml import quick_yaml
from ddpexp.config.registry import names_the_same
from ddpexp.config.schema import DATA_KEYS, TYPED_SECTIONS
from ddpexp.config.sentences import check_override, first_line, one_sentence, sentence, unknown_key_of
from ddpexp.config.user_files import check_user_files
from ddpexp.config.versions import VERSION_BASE, get_yaml_loader, register_resolver
from ddpexp.errors import RefusedError
from ddpexp.system.files import check_yaml

_MODE = re.compile(r"\+*hydra\.mode=multirun$", re.IGNORECASE)
_ONE_RUN = re.compile(r"\+*hydra\.mode=run$", re.IGNORECASE)
_NO_NAME = re.compile(r"[+-]?\d[\d_]*\.?\d*(e[+-]?\d+)?|true|false", re.IGNORECASE)  # what Hydra takes for no text
# A typed `_target_` of a section that is called with its other keys, or of a node in it.
_TARGET = re.compile(r"\+{0,2}((?:task|model|data|optimizer|scheduler)(?:\.\w+)*)\._target_=(.*)")


def _dirname_of_job(conf: Any, words: Sequence[str]) -> str:
    return dirname(words, conf["kv_sep"], conf["item_sep"], conf["exclude_keys"])


_OPTIONS = (
    "--help",
    "--hydra-help",
    "--version",
    "--cfg",
    "--resolve",
    "--package",
    "--multirun",
    "--config-dir",
    "--info",
)


class SweepInFileError(RefusedError):
    """A config file makes a command a sweep that its words do not ask for."""


@dataclass(frozen=True)
class Composed:
    """A composed configuration: plain values, and how it came to be."""

    values: Mapping[str, Any]  # resolved
    text: str  # YAML, resolved but for references to the environment, which may be secrets
    overrides: tuple[str, ...]  # as typed
    warnings: tuple[str, ...]


def compose_command(argv: list[str]) -> Composed | Swept | None:
    """Compose what a command line asks for: a run, or a sweep, be it by its words or by `hydra.mode` in a config file.

    None when it was a question (`--help`, `--cfg`, ...), which is answered then.

    Raises:
        RefusedError: whatever Hydra or OmegaConf refuses.
    """
    if is_sweep(argv):
        return compose_sweep(argv)
    try:
        return compose(argv)
    except SweepInFileError:
        return compose_sweep(argv)


def compose(argv: list[str]) -> Composed | None:
    """Compose the tree of one run; None when the command line was a question (`--help`, `--cfg`, ...), answered here.

    Raises:
        RefusedError: whatever Hydra or OmegaConf refuses. SweepInFileError: a config file makes it a sweep.
    """
    if "--version" in argv:
        print(f"ddpexp {__version__}")
        return None
    words = _words(argv)
    for_hydra = _asks_hydra(words)
    if words.multirun and words.cfg:
        raise RefusedError(f"--cfg {words.cfg} shows one run: leave -m out, and give each key one value.")
    of_hydra = any(word.lstrip("+~").startswith("hydra") for word in words.overrides)
    may_sweep = of_hydra and (words.config_dir is not None or bool(searched_packages()))  # for a config file may say so
    _check_words(words.overrides, bool(for_hydra), in_sweep=may_sweep)
    with one_sentence(), bounded_interpolations():
        if for_hydra:
            asked = (
                _without_inherited(words.overrides, added_folder(words.config_dir)) if words.cfg else words.overrides
            )
            _let_hydra_answer([*(word for word in argv if word not in words.overrides), *asked])
            return None
        added = added_folder(words.config_dir)
        cfg = _hydra_composes(words.overrides, added)
        if cfg.hydra.mode == RunMode.MULTIRUN:
            raise _sweep_in_file()
        for word in words.overrides:
            check_not_typed(word, in_sweep=False)
        of_sweeps = next((word for word in words.overrides if re.match(r"\+*sweep\.", word)), None)
        if of_sweeps is not None:
            raise RefusedError(f"{of_sweeps} is for sweeps: add -m, or leave it out.")
        typed = [word for word in words.overrides if not _ONE_RUN.match(word)]
        unused = (
            ("hydra.sweeper.params in a config file is for sweeps: add -m",) if cfg.hydra.sweeper.get("params") else ()
        )
        composed = _composed(_Base.of(cfg), typed, added)
        return replace(composed, warnings=(*composed.warnings, *unused))


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
    intervals: tuple[str, ...]  # words that give a range of values to choose from
    words: tuple[str, ...]  # as typed
    folder: str | None  # hydra.sweep.dir, where it was typed or a config file sets it
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
        _check_outside_sweep(word)
    _check_words(overrides, False, in_sweep=True)
    _check_single_values(overrides)
    _check_typed_once(overrides)
    added = added_folder(words.config_dir)
    for choice in _choices(overrides):
        check_user_files(choice, added)
    with (
        one_sentence(), bounded_interpolations(), quick_yaml(),
        hydra.initialize_config_dir(str(conf_folder()), job_name="ddpexp", **VERSION_BASE),
    ):  # fmt: skip
        found = GlobalHydra.instance().hydra
        assert found is not None
        parsed = OverridesParser.create(found.config_loader).parse_overrides(overrides)
        cfg = _composed_for_sweep(found, overrides, added)
        _check_nothing_ignored(cfg, overrides, added)
        trusted = next(
            (one.value() for one in reversed(parsed) if one.get_key_element().lstrip("+") == "run.trust"), None
        )
        prefixes = tuple(map(str, trusted)) if isinstance(trusted, list) else ()
        check_code_of_sweeper(cfg.hydra.sweeper, Trust(prefixes, added.parent if added else None))
        of_sweeper = cfg.hydra.sweeper.get("params") or {}
        chosen = OmegaConf.to_container(cfg.hydra.sweep, resolve=False) != _default_sweep()
        with answered(answers_of(cfg)):
            settings = OmegaConf.to_container(cfg.sweep, resolve=True)
            never_evaluated = OmegaConf.select(cfg, "trainer.eval_every") == 0
            cfg.hydra.sweep.dir = str(
                cfg.hydra.sweep.dir
            )  # resolved here, where what is wrong with it becomes a sentence
        of_file = OverridesParser.create(found.config_loader).parse_overrides(
            [f"{key}={one}" for key, one in of_sweeper.items()]
        )
    swept = {one.get_key_element() for one in parsed if one.is_sweep_override()}
    for key in swept:
        if re.match(r"\+*(sweep\.|hydra)", key):
            raise RefusedError(f"{key} is a setting of the sweep itself: give it one value.")
    assert isinstance(settings, dict)
    objective = settings.get("objective")
    if never_evaluated and "trainer.eval_every" not in swept and re.match(r"(eval|validation)/", str(objective)):
        raise RefusedError(f"sweep.objective={objective} needs evaluations, and trainer.eval_every=0 makes none.")
    return Swept(
        cfg=cfg,
        loader=found.config_loader,
        settings={str(key): value for key, value in settings.items()},
        keys=frozenset({*swept, *map(str, of_sweeper)}),
        intervals=tuple(str(one.input_line) for one in (*parsed, *of_file) if one.is_interval_sweep()),
        words=tuple(overrides),
        folder=cfg.hydra.sweep.dir if chosen else None,
        config_dir=words.config_dir,
        warnings=_warnings(added),
    )


def _composed_for_sweep(found: Hydra, overrides: list[str], added: Path | None) -> DictConfig:
    """Compose with Hydra as it does for a sweep: words that give several values are left to the jobs."""
    words = _forced(overrides, _typed_targets(overrides))
    cfg = found.compose_config(
        "config",
        [*_searched(added), *words],
        RunMode.MULTIRUN,
        with_log_configuration=False,
        validate_sweep_overrides=False,
    )
    cfg.hydra.overrides.task = overrides  # what sweepers read
    return cfg


def _default_sweep() -> Any:
    """Return what ddpexp's own configuration says of a sweep's directory, and Hydra of its parts."""
    written = yaml.load(
        (conf_folder() / "config.yaml").read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    return {"subdir": "${hydra.job.num}", **written["hydra"]["sweep"]}


@dataclass(frozen=True)
class _Base:
    """What Hydra has composed, without its own section and that of sweeps."""

    cfg: DictConfig
    choices: Mapping[str, str]  # which options of the groups
    answers: Mapping[str, Any]  # to ${hydra:...}

    @classmethod
    def of(cls, cfg: DictConfig) -> _Base:
        """Take what Hydra has composed apart."""
        answers = answers_of(cfg)
        chosen = cfg.hydra.runtime.choices.items()
        choices = {str(group): option.removesuffix(".yaml") for group, option in chosen if isinstance(option, str)}
        with open_dict(cfg):
            del cfg["hydra"]
            del cfg["sweep"]
        return cls(cfg, choices, answers)


class JobComposer:
    """Composes the jobs of a sweep; the files are read once for each choice of options, and values put into a copy."""

    def __init__(self, swept: Swept) -> None:
        """Take the sweep."""
        self._swept = swept
        self._bases: dict[tuple[str, ...], _Base] = {}
        self._dirname = partial(_dirname_of_job, OmegaConf.to_container(swept.cfg.hydra.job.config.override_dirname))
        self._parser = OverridesParser.create(swept.loader)

    def _is_value(self, word: str) -> bool:
        """Tell whether a word is swept and sets a value.

        What has a dot is the key of one, groups are paths with slashes.
        """
        key = word.partition("=")[0]
        return key in self._swept.keys and re.match(r"\w+\.", key) is not None

    def compose(self, words: Sequence[str], run: Path, number: int = 0) -> Composed:
        """Compose the job with this number from all its words; it will lie in the directory `run`.

        Raises:
            RefusedError: whatever Hydra or OmegaConf refuses.
        """
        nodes = _typed_targets(words)
        values = [word for word in words if self._is_value(word) and not _is_in(word, nodes)]
        rest = tuple(word for word in words if word not in values)
        added = added_folder(self._swept.config_dir)
        with one_sentence(), bounded_interpolations():
            if rest not in self._bases:
                self._bases[rest] = _Base.of(_hydra_composes(list(rest), added))
            base = self._bases[rest]
            cfg = copy.deepcopy(base.cfg)
            ConfigLoaderImpl._apply_overrides_to_config(self._parser.parse_overrides(values), cfg)
            of_job = {
                "job.num": number, "sweep.dir": self._swept.cfg.hydra.sweep.dir, "mode": "MULTIRUN",
                "job.override_dirname": self._dirname(words),
            }  # fmt: skip
            return _composed(replace(base, cfg=cfg, answers={**base.answers, **of_job}), words, added, run)


def _asks_hydra(words: Namespace) -> bool:
    """Tell whether the words are a question to Hydra; refuse its options that do not apply."""
    if words.config_path or words.config_name or words.experimental_rerun:
        raise RefusedError(
            "--config-path, --config-name and --experimental-rerun do not apply: use --config-dir DIR recipe=NAME."
        )
    if words.shell_completion:
        raise RefusedError(
            '--shell-completion is Hydra\'s own: type eval "$(ddpexp completion bash)" (ddpexp help completion).'
        )
    return bool(words.hydra_help or words.cfg or words.info)


def _check_outside_sweep(word: str) -> None:
    key, _, value = word.lstrip("+~").partition("=")
    if key in ("sweep", "hydra.sweeper"):
        example = {"sweep": "sweep.slots=2", "hydra.sweeper": "hydra.sweeper.n_trials=20"}[key]
        raise RefusedError(f"{word}: {key} is a section: set its keys, such as {example}.")
    if key == "hydra/sweeper" and (value == "null" or _NO_NAME.fullmatch(value)):
        raise RefusedError(
            f"{word}: every sweep needs one, such as hydra/sweeper=basic, which is there when nothing is typed."
        )
    if key == "run.dir":
        raise RefusedError(
            f"{word}: every job of a sweep has a run directory of its own, right below hydra.sweep.dir=... ."
        )
    if _ONE_RUN.match(word):
        raise RefusedError(f"{word} is one run, and -m a sweep: leave one of them out.")


def _check_single_values(overrides: Sequence[str]) -> None:
    """Refuse what seems to be several values of a sweep for a key that takes a number, written as one value.

    Raises:
        RefusedError: with the values as a sweep takes them.
    """
    for word in overrides:
        key, equals, value = word.lstrip("+").partition("=")
        if not equals or key == "trainer.gpus" or re.match(r"~|hydra|sweep", word) or not takes_number(key):
            continue
        meant = several(value)
        if meant is not None and meant != value.strip() and not re.fullmatch(r"[^\[\](){}]*,[^\[\](){}]*", value):
            suggestion = shlex.quote(f"{key}={meant}") if "(" in meant else f"{key}={meant}"
            raise RefusedError(f"{word} is one value, and {key} takes a number. Did you mean {suggestion}?")


def _check_typed_once(overrides: Sequence[str]) -> None:
    """Refuse a key that a sweep has been given twice, as the shell makes it of `key={1,2}`: only the last would count.

    Several values may follow a single one, which a script has typed before them as its own default.

    Raises:
        RefusedError: with the key and its values.
    """
    values: dict[str, list[str]] = {}
    for word in overrides:
        key, equals, value = word.lstrip("+").partition("=")
        if equals and not re.match(r"~|sweep\.|hydra[./]", word):
            values.setdefault(key, []).append(value)
    for key, typed in values.items():
        sweeps = [bool(re.search(r"[,(\[{]", value)) for value in typed]
        if len(set(typed)) < 2 or (sweeps[-1] and not any(sweeps[:-1])):
            continue
        if any(sweeps):
            raise RefusedError(f"{key} is typed twice: leave {key}={typed[0]} or {key}={typed[-1]} out.")
        raise RefusedError(f"{key} is typed twice: write {key}={','.join(dict.fromkeys(typed))}.")


def _choices(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides once for every option that they choose of a group, as `recipe=a,b` chooses two."""
    parts = [word.partition("=") for word in overrides if "." not in word.partition("=")[0]]
    return [[f"{key}={option}"] for key, _, options in parts for option in options.split(",")]


def _words(argv: list[str]) -> Namespace:
    parser = get_args_parser()
    parser.exit_on_error = False  # its own way to refuse is a page of usage, of Hydra's flags
    abbreviated = next((word for word in argv if re.match("--config(=|$)", word)), None)
    if abbreviated is not None:
        raise RefusedError(f"{abbreviated} is not an option. Did you mean --config-dir?")
    try:
        words, unknown = parser.parse_known_intermixed_args(argv)  # options may stand anywhere
    except ArgumentError as error:
        raise RefusedError(f"{error}. --help shows what can be typed.") from None
    if unknown:
        raise RefusedError(_no_option(unknown[0]))
    if sum(word.partition("=")[0] in ("--config-dir", "-cd") for word in argv) > 1:
        raise RefusedError("--config-dir is typed twice: it takes one folder.")
    if (words.package or words.resolve) and not words.cfg:
        option = "--package" if words.package else "--resolve"
        raise RefusedError(f"{option} goes with a question, such as --cfg job {option}.")
    return words


def _no_option(word: str) -> str:
    """Say what may be meant by an option that there is not: an option, or a key of the configuration."""
    name, _, value = word.lstrip("-").partition("=")
    option = nearest(f"--{name}", _OPTIONS, 0.8) if word.startswith("--") else None
    if option is not None:
        return f"{word} is not an option. Did you mean {option}?"
    key = name.replace("-", "_")
    advice = advice_on_key(key)
    section = next((section for section, typed in TYPED_SECTIONS.items() if key in typed.__dataclass_fields__), None)
    if not advice and section is not None:
        advice = f" Did you mean {section}.{key}={value or '...'}?"
    return f"{word} is not an option: write key=value, for example trainer.gpus=2.{advice}"


def _check_words(overrides: list[str], question: bool, in_sweep: bool = False) -> None:
    """Refuse what Hydra would take without effect, or answer with a traceback."""
    check_override(overrides)
    for word in overrides:
        key, _, value = word.lstrip("+~").partition("=")
        if key == "sweep.dir":
            of_run = "" if in_sweep else f" or, for one run, run.dir={value}"
            raise RefusedError(f"sweep.dir is not a known key. Did you mean hydra.sweep.dir={value} (with -m){of_run}?")
        if not question:
            check_not_typed(word, in_sweep)
        if word.startswith("~"):
            _check_no_deletion(word, key)
        several = re.fullmatch(r"\[(.*,.*)\]", value)
        if several is not None and key in groups([conf_folder()]):
            raise RefusedError(
                f"{word} chooses several options, and a run has one: -m {key}={several[1]} makes a run with each."
            )
        if value == "null" and key in groups([conf_folder()]):
            raise RefusedError(f"{word}: every run needs one. Known here: {', '.join(options(key, [conf_folder()]))}.")
        number = next((part for part in value.split(",") if _NO_NAME.fullmatch(part.strip())), None)
        if number is not None and key in groups([conf_folder()]):
            raise RefusedError(
                f"{key}={number} is not a known option. Known here: {', '.join(options(key, [conf_folder()]))}."
            )


def _check_no_deletion(word: str, key: str) -> None:
    """Refuse to remove what every run has."""
    section, _, name = key.partition(".")
    if section in groups([conf_folder()]) and not name:
        raise RefusedError(f"{word}: every run needs one. Known here: {', '.join(options(section, [conf_folder()]))}.")
    typed = TYPED_SECTIONS.get(section)
    if typed is None or name not in typed.__dataclass_fields__:
        return
    instead = (
        f"{key}=null switches it off"
        if type(None) in get_args(get_type_hints(typed)[name])
        else f"write {key}=... to change it"
    )
    raise RefusedError(f"{word}: every run has this key, so it cannot be removed: {instead}.")


def _let_hydra_answer(argv: list[str]) -> None:
    arguments, sys.argv = sys.argv, ["ddpexp", *argv]
    try:
        with quick_yaml(), suppress(BrokenPipeError):  # the reader has gone (`| head`)
            hydra.main(config_path=str(conf_folder()), config_name="config", **VERSION_BASE)(lambda cfg: None)()
    finally:
        sys.argv = arguments


@dataclass(frozen=True)
class Overview:
    """What some words compose, for those who explain it."""

    values: Mapping[str, Any]  # the tree, with ${...} as it is written
    of_hydra: Mapping[str, Any]  # what sweeps understand of Hydra's own section
    choices: Mapping[str, str]  # which option of each group was chosen
    folders: Sequence[Path]  # that hold the groups, in the order in which they count; ours is the first


def split(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the words of a command line that are no options, and what stands behind --config-dir.

    Raises:
        RefusedError: an option that is not known.
    """
    words = _words(list(argv))
    return [word for word in words.overrides if not _MODE.match(word)], words.config_dir


def overview(overrides: Sequence[str], directory: str | None) -> Overview:
    """Compose the tree to explain it, not to run it.

    Raises:
        RefusedError: whatever Hydra or OmegaConf refuses.
    """
    _check_words(list(overrides), False)
    with one_sentence(), bounded_interpolations(), quick_yaml():
        added = added_folder(directory)
        cfg = _hydra_composes(list(overrides), added)
        choices = {str(group): option for group, option in cfg.hydra.runtime.choices.items() if isinstance(option, str)}
        values = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(values, dict)
    of_hydra = {"sweep": {"dir": values.pop("hydra")["sweep"]["dir"]}}
    values.setdefault("recipe", {}).setdefault("name", choices.get("recipe", "run"))
    folders = dict.fromkeys([conf_folder(), *([added] if added else []), *plugin_folders(), *searched_packages()])
    return Overview({str(key): value for key, value in values.items()}, of_hydra, choices, list(folders))


def _hydra_composes(overrides: list[str], added: Path | None) -> DictConfig:
    # Hydra's own main composes twice, once to learn whether this is a sweep: the API does it once, in half the time.
    words = _without_inherited(overrides, added)
    with quick_yaml(), hydra.initialize_config_dir(str(conf_folder()), job_name="ddpexp", **VERSION_BASE):
        check_user_files(overrides, added)
        try:
            cfg = hydra.compose("config", [*_searched(added), *words], return_hydra_config=True)
        except ConfigCompositionException as error:
            if re.match("Ambiguous value|Sweep parameters", str(error)) and _is_sweep_in_file(overrides, added):
                raise _sweep_in_file() from None
            if gone := re.match(r"Could not delete from config\. '([^']+)' does not exist", str(error)):
                raise _nothing_to_delete(gone[1], overrides, added) from None
            raise
        _check_nothing_ignored(cfg, overrides, added)
        return cfg


def _check_nothing_ignored(cfg: DictConfig, overrides: list[str], added: Path | None) -> None:
    """Look at what files that are not ours set in Hydra's own section; inside of `hydra.initialize_config_dir`."""
    folders = [*([added] if added else []), *plugin_folders(), *searched_packages()]
    if not folders:
        return

    chosen = [(str(group), option) for group, option in cfg.hydra.runtime.choices.items() if isinstance(option, str)]
    paths = [folder / group / f"{option}.yaml" for group, option in chosen for folder in folders]
    check_no_ignored_options([path for path in paths if path.is_file()])

    def files() -> list[Path]:
        found = GlobalHydra.instance().config_loader()
        default_list = found.compute_defaults_list("config", [*_searched(added), *overrides], RunMode.MULTIRUN).defaults
        paths = [folder / f"{default.config_path}.yaml" for default in default_list for folder in folders]
        return [path for path in paths if path.is_file()]

    check_nothing_ignored(cfg, lambda: hydra.compose("config", _searched(added), return_hydra_config=True), files)


def _nothing_to_delete(key: str, overrides: list[str], added: Path | None) -> RefusedError:
    """Say whether there is no such key, or one whose value is null, which Hydra takes for the same."""
    rest = [word for word in overrides if not word.startswith("~")]
    cfg = hydra.compose("config", [*_searched(added), *rest], return_hydra_config=True)
    parent, _, name = key.rpartition(".")
    section = OmegaConf.select(cfg, parent) if parent else cfg
    if isinstance(section, DictConfig) and name in section:
        return RefusedError(f"~{key}: its value is null, and there is nothing to remove: leave ~{key} out.")
    names = [str(one) for one in section if one != "hydra"] if isinstance(section, DictConfig) else []
    return unknown_key(name, names, parent)


def _is_sweep_in_file(overrides: list[str], added: Path | None) -> bool:
    found = GlobalHydra.instance().hydra
    assert found is not None
    return bool(_composed_for_sweep(found, overrides, added).hydra.mode == RunMode.MULTIRUN)


def _sweep_in_file() -> SweepInFileError:
    return SweepInFileError(
        "A config file sets hydra.mode=MULTIRUN, which makes this a sweep: add hydra.mode=RUN for one run."
    )


def _typed_targets(overrides: Sequence[str]) -> dict[str, str]:
    """Return the nodes whose `_target_` is typed, with what it is; outer nodes first."""
    found = {match[1]: match[2] for word in overrides if (match := _TARGET.match(word))}
    return dict(sorted(found.items(), key=lambda item: item[0].count(".")))


def _is_in(word: str, nodes: Iterable[str]) -> bool:
    """Tell whether a word is about a key of one of the nodes."""
    key = word.lstrip("+~").partition("=")[0]
    return any(key.startswith(f"{node}.") for node in nodes)


def _forced(overrides: Sequence[str], nodes: Iterable[str]) -> list[str]:
    """Let every key be set in the nodes: no file says which ones the targets take."""
    return [f"++{word}" if word[:1] not in "+~" and _is_in(word, nodes) else word for word in overrides]


def _without_inherited(overrides: Sequence[str], added: Path | None) -> list[str]:
    """Return words for Hydra that also remove what files say of another `_target_` than the one that is typed."""
    typed = _typed_targets(overrides)
    if not typed:
        return list(overrides)
    before = _hydra_composes([word for word in overrides if not _is_in(word, typed)], added)
    removed: dict[str, list[str]] = {}
    for name, target in typed.items():
        node = OmegaConf.select(before, name)
        same = isinstance(node, DictConfig) and names_the_same(name, node.get("_target_"), target)
        if not same and not _is_in(f"{name}._target_", removed):
            removed[name] = _keys_of_target(node, name)
    # Hydra deletes neither a null nor what it cannot resolve, so a key gets another value before.
    gone = [word for name, keys in removed.items() for key in keys for word in (f"++{name}.{key}=0", f"~{name}.{key}")]
    return [*gone, *_forced([word for word in overrides if word[0] != "~" or not _is_in(word, removed)], removed)]


def _keys_of_target(node: Any, name: str) -> list[str]:
    """Return the keys of a node that are for its target, and not for every kind of data."""
    general = {"_target_", *DATA_KEYS} - {"prepare"} if name == "data" else {"_target_"}
    return [str(key) for key in node if key not in general] if isinstance(node, DictConfig) else []


def _searched(added: Path | None) -> list[str]:
    """Return the word that tells Hydra where else there are configs."""
    folders = [*([added] if added else []), *plugin_folders()]
    return [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in folders)}]"] if folders else []


def _composed(base: _Base, overrides: Sequence[str], added: Path | None, run: Path | None = None) -> Composed:
    with answered(base.answers):
        values, kept = _plain(base.cfg), _resolved_but_secrets(base.cfg, base.answers)
    _check_trust_is_typed(values, overrides)
    for tree in (values, kept):
        tree["run"]["code"] = str(added.parent) if added else None
        if run is not None:
            tree["run"]["dir"] = str(run)
        tree.setdefault("recipe", {}).setdefault("name", base.choices.get("recipe", "run"))
    offered = _offered(values)
    for tree in (values, kept) if offered else ():
        tree["run"]["trust"] = [*(values["run"]["trust"] or ()), *offered]
    folders = [conf_folder(), *([added] if added else []), *searched_packages()]
    _check_types(values, base.choices, folders, _typed_targets(overrides))
    check_present(values, _trust(values))
    return Composed(values, OmegaConf.to_yaml(OmegaConf.create(kept)), tuple(overrides), _warnings(added))


def _offered(values: Mapping[str, Any]) -> list[str]:
    """Return the names in a configuration that count.

    As trusted because an installed package offers them by its own configs.
    """
    trust = _trust(values)
    foreign = {
        str(name) for key, name in named(values).items() if not trust.allows(str(name), key.removesuffix("._target_"))
    }
    return sorted(foreign & offered_targets()) if foreign else []


def _trust(values: Mapping[str, Any]) -> Trust:
    run = values["run"]
    prefixes = run["trust"] if isinstance(run["trust"], list) else ()  # else it is refused for its type
    return Trust(tuple(map(str, prefixes)), Path(run["code"]) if run["code"] else None)


def _warnings(added: Path | None) -> tuple[str, ...]:
    return tuple(warning for folder in ([added] if added else []) + plugin_folders() for warning in _shadowed(folder))


def _resolved_but_secrets(cfg: DictConfig, answers: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve the tree, but leave as written what reads the environment, directly or through other keys.

    `answers` are those to `${hydra:...}`, which nobody has who reads it later.
    """
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
            return written_out(raw, answers) if reads or "${" in str(plain) else plain

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


def _check_trust_is_typed(values: Mapping[str, Any], typed: Sequence[str]) -> None:
    run = values.get("run")
    if not isinstance(run, Mapping):
        raise RefusedError(f"run={run} is not a section: set its keys, such as run.dir=... .")
    if run.get("trust") and not any(word.lstrip("+").startswith("run.trust=") for word in typed):
        raise RefusedError(f"run.trust={run['trust']} stands in a file: it counts only when typed on the command line.")
    if run.get("allow_changes") and not any(word.lstrip("+").startswith("run.allow_changes=") for word in typed):
        raise RefusedError(
            f"run.allow_changes={run['allow_changes']} stands in a file: it is for one start, so it counts only when "
            "typed on the "
            f"command line."
        )
    if run.get("code"):
        raise RefusedError(f"run.code={run['code']} cannot be set: type --config-dir DIR to use the code beside DIR.")


def _check_types(
    values: Mapping[str, Any], choices: Mapping[str, str], folders: list[Path], typed_targets: Iterable[str]
) -> None:
    """Compare the values of the sections that name an object with the types in the chosen option's own file.

    The other sections have fields with types, which `parse` holds against them. What `typed_targets` take no file says.
    """
    sections = [section for section in ("task", "model", "data", "optimizer") if section not in typed_targets]
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
                _compare(
                    {key: inner for key, inner in default.items() if key not in typed_here},
                    values.get(section),
                    section,
                )


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


@bounded_interpolations()
@quick_yaml()
def override_file(path: Path, argv: list[str], goes_on: bool = False) -> tuple[Mapping[str, Any], str]:
    """Read a run directory's config.yaml and override it with `key=value` words; also return it as text.

    What the file says of whose code to trust does not count: run.trust and --config-dir are typed again. Nor does
    run.allow_changes, which was for the start that it was typed for. A run that `goes_on` keeps its launcher unless
    another one is typed, and may take other options of its groups.

    Raises:
        RefusedError: the file is damaged, or a word is no override of it.
    """
    words = _words(argv)
    try:
        check_yaml(path)
        cfg = OmegaConf.load(path)
    except (OSError, ValueError, OmegaConfBaseException, yaml.YAMLError) as error:
        raise RefusedError(f"{path} cannot be read: {first_line(error)}.") from None
    if not isinstance(cfg, DictConfig) or not isinstance(cfg.get("run"), DictConfig):
        raise RefusedError(f"{path} is not the configuration of a run.")
    added = added_folder(words.config_dir)
    check_override(words.overrides)
    chosen_from = (
        groups([folder for folder in (conf_folder(), added) if folder is not None]) if goes_on else ["launcher"]
    )
    chosen = {key: name for key, _, name in (word.partition("=") for word in words.overrides) if key in chosen_from}
    if not goes_on:
        chosen.setdefault("launcher", "spawn")  # how that run was started does not matter here
    for group, name in chosen.items():
        cfg[group] = _option(group, name, added)
    cfg.run.trust, cfg.run.code = [], str(added.parent) if added is not None else None
    cfg.run.allow_changes = []
    nodes = _remove_inherited(cfg, _typed_targets(words.overrides))
    OmegaConf.set_struct(cfg, True)
    try:
        for word in words.overrides:
            if word.partition("=")[0] not in chosen:
                _override(cfg, word, adds=_is_in(word, nodes))
        with answered({"runtime.cwd": os.getcwd(), "job.name": "ddpexp"}):
            values = _plain(cfg)
        if offered := _offered(values):
            cfg.run.trust = values["run"]["trust"] = [*(values["run"]["trust"] or ()), *offered]
        check_present(values, _trust(values))
        return values, OmegaConf.to_yaml(cfg)
    except OmegaConfBaseException as error:
        raise RefusedError(f"{path}: {sentence(error)}") from None


def _option(group: str, name: str, added: Path | None = None) -> DictConfig:
    folders = [conf_folder(), *([added] if added is not None else []), *plugin_folders()]
    known = options(group, folders)
    if name not in known:
        raise RefusedError(f"{group}={name} is not a known option.{did_you_mean(name, known, f'{group}=')}")
    found = OmegaConf.load(
        next(folder / group / f"{name}.yaml" for folder in folders if (folder / group / f"{name}.yaml").is_file())
    )
    assert isinstance(found, DictConfig)
    if "defaults" in found or group == "recipe":
        raise RefusedError(f"{group}={name} is made of several files: type the whole command again, with run.dir=... .")
    return found


def _remove_inherited(cfg: DictConfig, typed: Mapping[str, str]) -> list[str]:
    """Remove what a configuration says of another `_target_` than the typed one.

    Return the nodes that have another one.
    """
    others = []
    for name, target in typed.items():
        node = OmegaConf.select(cfg, name)
        if isinstance(node, DictConfig) and not names_the_same(name, node.get("_target_"), target):
            others.append(name)
            for key in _keys_of_target(node, name):
                del node[key]
    return others


def _override(cfg: DictConfig, word: str, adds: bool = False) -> None:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise RefusedError(f"{word} is not an override: write key=value, for example trainer.gpus=2.")
    try:
        value = yaml.load(text, Loader=get_yaml_loader())
        if isinstance(OmegaConf.select(cfg, key), DictConfig):
            raise RefusedError(
                f"{word}: what the run was composed of stays; single keys can be changed, such as trainer.gpus=2."
            )
        OmegaConf.update(cfg, key, value, force_add=adds)
    except yaml.YAMLError:
        raise RefusedError(f"{word} is not an override: its value is no YAML.") from None
    except (ConfigKeyError, ConfigAttributeError) as error:
        raise RefusedError(unknown_key_of(key, error)) from None
