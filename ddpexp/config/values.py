"""Turn a composed tree into plain values and the text of a run's config.yaml."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import getitem
from pathlib import Path
from typing import Any, cast

from omegaconf import Container, DictConfig, OmegaConf, open_dict
from omegaconf.resolvers import oc

from ddpexp.compat.omegaconf import register_resolver
from ddpexp.config import facts
from ddpexp.config.build import shown
from ddpexp.config.folders import conf_folder, options
from ddpexp.config.hydra_section import (
    answered,
    answers_of,
    written_out,
)
from ddpexp.config.instantiate import Trust
from ddpexp.config.names import check_present, named
from ddpexp.config.plugins import offered_targets, plugin_folders, searched_packages
from ddpexp.config.registry import key_of
from ddpexp.config.trusted import covered
from ddpexp.config.typed_targets import typed_targets
from ddpexp.errors import RefusedError
from ddpexp.settings.data import DATA_KEYS
from ddpexp.system.secrets import with_references
from ddpexp.system.yaml_text import load_yaml


@dataclass(frozen=True)
class Composed:
    """A composed configuration: plain values, and what they were composed from."""

    values: Mapping[str, Any]  # resolved
    text: str  # YAML, resolved but for references to the environment, which may be secrets
    overrides: tuple[str, ...]  # as typed
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Tree:
    """A tree that Hydra has composed, without the sections `hydra` and `sweep`."""

    cfg: DictConfig
    choices: Mapping[str, str]  # the chosen option of each group
    answers: Mapping[str, Any]  # to ${hydra:...}

    @classmethod
    def of(cls, cfg: DictConfig) -> Tree:
        """Separate Hydra's section from the rest."""
        answers = answers_of(cfg)
        chosen = cfg.hydra.runtime.choices.items()
        choices = {str(group): option.removesuffix(".yaml") for group, option in chosen if isinstance(option, str)}
        with open_dict(cfg):
            del cfg["hydra"]
            del cfg["sweep"]
        return cls(cfg, choices, answers)


def finish(base: Tree, overrides: Sequence[str], added: Path | None, run: Path | None = None) -> Composed:
    """Resolve a tree and check what only its values show; `run` is the run directory of a job.

    Raises:
        RefusedError: a value of another type, a name that is not defined, a file that grants trust, or one that the
            command chooses and that an option of ours hides.
    """
    with answered(base.answers):
        values, kept = plain(base.cfg), _resolved_but_secrets(base.cfg, base.answers)
    _check_trust_is_typed(values, overrides)
    if added is not None:
        _check_chosen_is_used(added, base.choices, values)
    for tree in (values, kept):
        tree["run"]["code"] = str(added.parent) if added else None
        if run is not None:
            tree["run"]["dir"] = str(run)
        tree.setdefault("recipe", {}).setdefault("name", base.choices.get("recipe", "run"))
    offered = offered_by_packages(values)
    if offered:
        values["run"]["trust"] = kept["run"]["trust"] = [*(values["run"]["trust"] or ()), *offered]
    folders = [conf_folder(), *([added] if added else []), *plugin_folders(), *searched_packages()]
    _check_types(values, base.choices, folders, typed_targets(overrides))
    check_present(values, trust_of(values))
    return Composed(values, text_of(kept), tuple(overrides), warnings_of(added, base.choices, overrides))


def text_of(tree: Mapping[str, Any]) -> str:
    """Return a configuration as YAML, with references to the environment for all its secrets.

    Raises:
        RefusedError: no reference can stand for one of them.
    """
    return OmegaConf.to_yaml(OmegaConf.create(with_references(tree)))


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Return the resolved values; a missing one raises OmegaConf's error."""
    values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    return {str(key): value for key, value in cast(dict[Any, Any], values).items()}


def _resolved_but_secrets(cfg: DictConfig, answers: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve the tree, but leave as written what reads the environment, directly or through other keys.

    `answers` are the values of `${hydra:...}`, which only this command knows.
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
            return written_out(raw, answers) if reads or "${" in facts.without_references(str(plain)) else plain

        tree: dict[str, Any] = kept(OmegaConf.to_container(cfg, resolve=False), lambda: cfg)
    return tree


@contextmanager
def _reads_of_environment() -> Iterator[list[str]]:
    """Collect the names that `${oc.env:NAME}` reads."""
    reads: list[str] = []

    def env(*arguments: str) -> Any:
        reads.append(arguments[0])
        return oc.env(*arguments)

    register_resolver("oc.env", env, replace=True)
    try:
        yield reads
    finally:
        register_resolver("oc.env", oc.env, replace=True)


def offered_by_packages(values: Mapping[str, Any]) -> list[str]:
    """Return the names in a configuration that are trusted without `run.trust`.

    They are those that an installed package's own configs use, and those that the user has trusted once.
    """
    trust = trust_of(values)
    foreign = {
        str(name) for key, name in named(values).items() if not trust.allows(str(name), key.removesuffix("._target_"))
    }
    return sorted((foreign & offered_targets()) | covered(foreign)) if foreign else []


def trust_of(values: Mapping[str, Any]) -> Trust:
    """Return whose code a configuration may name."""
    run = values["run"]
    prefixes = run["trust"] if isinstance(run["trust"], list) else ()  # parse refuses another type
    return Trust(tuple(map(str, prefixes)), Path(run["code"]) if run["code"] else None)


def warnings_of(added: Path | None, choices: Mapping[str, str], overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the warnings about the user's and the plugins' files."""
    folders = ([added] if added else []) + plugin_folders()
    unchosen = _unchosen(added, choices.get("recipe", ""), overrides) if added else ()
    return (*unchosen, *(warning for folder in folders for warning in _shadowed(folder)))


def _unchosen(added: Path, recipe: str, overrides: Sequence[str]) -> Iterator[str]:
    """Yield a warning if the user's folder has recipes and the command leaves the default one."""
    ours = options("recipe", [conf_folder()])
    theirs = [name for name in options("recipe", [added]) if name not in ours]
    chooses = any(re.match(r"recipe=|\+[\w/]+=", override) for override in overrides)
    if recipe in ours and theirs and not chooses:
        offered = " or ".join(f"recipe={name}" for name in theirs)
        yield f"no recipe is chosen, so the default is used, recipe={recipe}; to use one of {added}, add {offered}."


def _shadowed(added: Path) -> Iterator[str]:
    """Yield a warning for each added option that one of ours hides."""
    for path, _ in _hidden(added):
        name = path.relative_to(added).with_suffix("")
        yield f"{path} is not used: ddpexp has its own {name}. Give yours another name."


def _check_chosen_is_used(added: Path, choices: Mapping[str, str], values: Mapping[str, Any]) -> None:
    for path, ours in _hidden(added):
        group, option = path.parent.name, path.stem
        several = values.get(group) if group not in choices else None  # the loggers of a list, by their names
        if choices.get(group) == option or (isinstance(several, Mapping) and option in several):
            raise RefusedError(
                f"{group}={option} is chosen, and two files have that name: {path}, which is hidden, and ddpexp's own "
                f"{ours}. Give yours another name, such as {group}/my_{option}.yaml for {group}=my_{option}."
            )


def _hidden(added: Path) -> Iterator[tuple[Path, Path]]:
    """Yield each added option that one of ours hides, and ours: Hydra searches our folder first."""
    for path in sorted(added.glob("*/*.yaml")):
        ours = conf_folder() / path.relative_to(added)
        if ours.is_file():
            yield path, ours


def _check_trust_is_typed(values: Mapping[str, Any], typed: Sequence[str]) -> None:
    run = values.get("run")
    if not isinstance(run, Mapping):
        raise RefusedError(f"run={run} is not a section: set its keys, such as run.dir=... .")
    if run.get("trust") and not any(override.lstrip("+").startswith("run.trust=") for override in typed):
        raise RefusedError(f"run.trust={run['trust']} is set in a file, and counts only on the command line.")
    if run.get("allow_changes") and not any(
        override.lstrip("+").startswith("run.allow_changes=") for override in typed
    ):
        raise RefusedError(
            f"run.allow_changes={run['allow_changes']} is set in a file: it is for one start, so it counts only on the "
            "command line."
        )
    if run.get("code"):
        raise RefusedError(f"run.code={run['code']} cannot be set: type --config-dir DIR to use the code beside DIR.")


def _check_types(
    values: Mapping[str, Any], choices: Mapping[str, str], folders: list[Path], typed_targets: Iterable[str]
) -> None:
    """Compare the values of sections with a `_target_` with the types in the chosen option's own file.

    The other sections are typed, and so are our schedules: `parse` checks them. Sections in `typed_targets` have no
    file to compare with.
    """
    sections = [section for section in ("task", "model", "data", "optimizer") if section not in typed_targets]
    scheduler = values.get("scheduler")
    if isinstance(scheduler, Mapping) and key_of("scheduler", scheduler.get("_target_")) is None:
        sections += [section for section in ("scheduler",) if section not in typed_targets]
    for group in ("recipe", *sections):
        paths = [folder / group / f"{choices.get(group)}.yaml" for folder in folders]
        path = next((path for path in paths if path.is_file()), None)
        written = load_yaml(path.read_text()) if path else None
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
    """Refuse a value that is no number, truth or list where the file has one; a text in the file allows anything."""
    if isinstance(default, dict):
        if isinstance(value, Mapping):
            for name, inner in default.items():
                _compare(inner, value.get(name), f"{key}.{name}")
        return
    if value is None or default is None or isinstance(default, str) or facts.refers(value):
        return
    if isinstance(default, list):
        if not isinstance(value, list | tuple):
            one = "" if isinstance(value, Mapping) else f": type {key}=[{shown(value)}] for a list of one"
            raise RefusedError(f"{key}={shown(value)} is not a list (its default is {default}){one}.")
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
