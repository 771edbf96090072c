"""Override the configuration stored in a run directory's config.yaml."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from ddpexp.compat.omegaconf import get_yaml_loader, quick_yaml
from ddpexp.config.arguments import Arguments
from ddpexp.config.build import did_you_mean
from ddpexp.config.declared import declared
from ddpexp.config.folders import LISTED, added_folder, conf_folder, groups, options
from ddpexp.config.interpolations import answered, bounded_interpolations, only_resolvers
from ddpexp.config.names import check_present
from ddpexp.config.override_checks import check_chosen_once
from ddpexp.config.override_syntax import check_syntax
from ddpexp.config.plugins import plugin_folders
from ddpexp.config.replaced_targets import counts_unlisted, is_in, keys_of_target, typed_targets
from ddpexp.config.resolve import offered_by_packages, text_of, trust_of
from ddpexp.config.restated import Place, Reader, UnrestatedError, leaves, unrestated
from ddpexp.config.schema import Experiment
from ddpexp.config.sentences import first_line, refusal, unknown_key_of
from ddpexp.config.validate import ALERT_URL
from ddpexp.errors import RefusedError
from ddpexp.system.files import check_yaml, shortest
from ddpexp.system.yaml_text import load_yaml

_IN_LIST = re.compile(r"(?<=[\[,])\s*([^\[\],'\"{}\s]*\$\{oc\.env:[\w.-]+\}[^\[\],'\"{}\s]*)(?=\s*[,\]])")
"""An item with a reference, which YAML takes only in quotes."""


@bounded_interpolations()
@quick_yaml()
def override_file(path: Path, argv: list[str], keeps: Collection[str] = ()) -> tuple[Mapping[str, Any], str]:
    """Read a run directory's config.yaml and apply overrides to it; also return the result as text.

    run.trust and the code folder of the file are ignored and must be restated in `argv`, and run.allow_changes was
    for an earlier start only. `keeps` are those of the sections `launcher` and `logger` that the command uses; in place
    of the others it has launcher=spawn and logger=none. With one of them, other options of all groups can be chosen.

    Raises:
        UnrestatedError: the file has settings that count only when `argv` restates them: see `ddpexp.config.restated`.
        RefusedError: the file is damaged, or an override does not apply to it.
    """
    arguments = Arguments.of(argv)
    cfg, stored = _loaded(path)
    added = added_folder(arguments.config_dir)
    check_syntax(arguments.overrides)
    chosen = _chosen(arguments.overrides, keeps, added)
    reader = Reader.of(arguments.overrides, stored, added, without=chosen)
    others = [override for override in arguments.overrides if override.partition("=")[0] not in chosen]
    try:
        with only_resolvers(lambda place, name: False):  # what the overrides replace is not resolved
            reader = reader.also(_choose(cfg, chosen, keeps, added))
            cfg.run.trust, cfg.run.code = [], str(added.parent) if added is not None else None
            cfg.run.allow_changes = []
            if "${" in str(stored["run"].get("dir")):  # nothing reads it: the run is where its file is
                cfg.run.dir = str(path.parent.absolute())
            _override_all(cfg, others)
        values, read = _resolved(cfg, reader)
    except OmegaConfBaseException as error:
        raise RefusedError(f"cannot be resolved: {refusal(error)}", place=path) from None
    written: Any = OmegaConf.to_container(cfg, resolve=False)
    if settings := unrestated(values, written, read, reader):
        raise UnrestatedError(shortest(path.parent), settings)
    if offered := offered_by_packages(values, _searched_packages):
        written["run"]["trust"] = values["run"]["trust"] = [*(values["run"]["trust"] or ()), *offered]
    check_present(values, trust_of(values))
    return values, text_of(written)


def _searched_packages() -> Mapping[Path, str]:
    """Return the folders that packages have Hydra search; only for names that nothing else trusts, as Hydra is slow."""
    from ddpexp.config.tree import searched_packages

    return searched_packages()


def _resolved(cfg: DictConfig, reader: Reader) -> tuple[dict[str, Any], Mapping[Place, str]]:
    """Return the values, and the resolvers that were refused; no values if they cannot be resolved without these.

    Raises: OmegaConfBaseException.
    """

    def allows(place: Place, name: str) -> bool:
        return reader.restates(place) or reader.trusts(name)

    with answered({"runtime.cwd": os.getcwd(), "job.name": "ddpexp"}), only_resolvers(allows) as read:
        try:
            values: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
            return {str(key): value for key, value in values.items()}, read
        except OmegaConfBaseException:
            if not read:
                raise
            return {}, read


def _loaded(path: Path) -> tuple[DictConfig, dict[str, Any]]:
    """Return the configuration in a file, and as plain values with its references.

    Raises:
        RefusedError: it cannot be read, or is not of sections, which a reference could stand for.
    """
    try:
        check_yaml(path)
        load_yaml(path.read_text())  # refuses tags, which OmegaConf's own loader takes
        cfg = OmegaConf.load(path)
    except (OSError, ValueError, OmegaConfBaseException, yaml.YAMLError) as error:
        raise RefusedError(f"cannot be read: {first_line(error)}", place=path) from None
    stored: Any = OmegaConf.to_container(cfg, resolve=False)
    if not isinstance(cfg, DictConfig) or not isinstance(stored.get("run"), dict):
        raise RefusedError("is not the configuration of a run", place=path)
    for name, section in stored.items():
        if name in Experiment.__dataclass_fields__ and not isinstance(section, dict | None):
            raise RefusedError(f"The key {name} is not a section with keys", place=path)
    if place := next((place for place, value in leaves(stored) if isinstance(value, bytes)), None):
        raise RefusedError(
            f"The value of {'.'.join(map(str, place))} is binary", suggestion="Write a text.", place=path
        )
    return cfg, stored


def _chosen(overrides: Sequence[str], keeps: Collection[str], added: Path | None) -> dict[str, str]:
    """Return the options of groups that the overrides choose, and those in place of sections that are not used."""
    chosen_from = groups([folder for folder in (conf_folder(), added) if folder is not None]) if keeps else ["launcher"]
    typed = (override.partition("=") for override in overrides)
    chosen = {key: name for key, _, name in typed if key in chosen_from}
    if "launcher" not in keeps:
        chosen.setdefault("launcher", "spawn")  # whatever the run itself was started with
    if "logger" not in keeps and not any(override.startswith("logger.") for override in overrides):
        chosen.setdefault("logger", "none")
    return chosen


def _choose(cfg: DictConfig, chosen: Mapping[str, str], keeps: Collection[str], added: Path | None) -> list[Place]:
    """Replace sections by chosen options, and return the places whose values are those of the options."""
    places: list[Place] = []
    for group, name in chosen.items():
        option = _listed(group, name, added) if group in LISTED else _option(group, name, added)
        places += [(group, str(key)) for key in option] if group in LISTED else [(group,)]
        if group == "logger" and group in keeps and isinstance(loggers := cfg.get(group), DictConfig):
            option[ALERT_URL] = OmegaConf.to_container(loggers, resolve=False).get(ALERT_URL)  # type: ignore[union-attr]
        cfg[group] = option
    return places


def _override_all(cfg: DictConfig, overrides: Sequence[str]) -> None:
    nodes = _remove_inherited(cfg, typed_targets(overrides))
    OmegaConf.set_struct(cfg, True)
    for override in overrides:
        _override(cfg, override, is_in(override, nodes) or counts_unlisted(override) or _is_field(override))


def _option(group: str, name: str, added: Path | None = None) -> DictConfig:
    folders = [conf_folder(), *([added] if added is not None else []), *plugin_folders()]
    available = options(group, folders)
    if name not in available:
        suggestion = did_you_mean(name, available, f"{group}=")
        raise RefusedError("is not a known option", key=group, value=name, suggestion=suggestion)
    option = OmegaConf.load(
        next(folder / group / f"{name}.yaml" for folder in folders if (folder / group / f"{name}.yaml").is_file())
    )
    assert isinstance(option, DictConfig)
    if group == "recipe":
        raise RefusedError(
            "A run keeps its recipe",
            key="recipe",
            value=name,
            suggestion="Leave it out, or start a new run with another run.dir.",
        )
    if "defaults" in option:
        raise RefusedError(
            "is made of several files",
            key=group,
            value=name,
            suggestion="Type the whole command again, with run.dir=... .",
        )
    return option


def _listed(group: str, names: str, added: Path | None) -> DictConfig:
    """Return the options that `logger=NAMES` or `callbacks=NAMES` chooses: one, or a list in brackets."""
    if group == "callbacks":
        check_chosen_once(names)
    chosen = re.sub(r"^\[(.*)\]$", r"\1", names).split(",")
    merged = OmegaConf.merge({}, *(_option(group, name.strip(), added) for name in chosen if name.strip()))
    assert isinstance(merged, DictConfig)
    return merged


def _remove_inherited(cfg: DictConfig, typed: Mapping[str, str]) -> list[str]:
    """Remove the keys of sections whose `_target_` is overridden with another one, and return those sections."""
    others = []
    for name, target in typed.items():
        node = OmegaConf.select(cfg, name)
        if isinstance(node, DictConfig) and node.get("_target_") != target:
            others.append(name)
            for key in keys_of_target(node, name):
                del node[key]
    return others


def _is_field(override: str) -> bool:
    """Return whether the key is a field of every run, which its file may lack."""
    section, _, name = override.partition("=")[0].partition(".")
    if (section, name) == ("logger", ALERT_URL):
        return True
    return section in ("trainer", "run", "predict") and f"{section}.{name}" in declared()


def _override(cfg: DictConfig, override: str, adds: bool = False) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RefusedError(
            "is not an override", suggestion="Write key=value, for example trainer.gpus=2.", place=override
        )
    try:
        value = yaml.load(_IN_LIST.sub(r'"\1"', text), Loader=get_yaml_loader())
        if isinstance(OmegaConf.select(cfg, key), DictConfig):
            raise RefusedError(
                "replaces a section, and a run keeps its sections",
                suggestion="Change single keys, such as trainer.gpus=2.",
                key=override,
            )
        OmegaConf.update(cfg, key, value, force_add=adds)
    except yaml.YAMLError:
        raise RefusedError("is not an override: its value is not YAML", place=override) from None
    except (ConfigKeyError, ConfigAttributeError) as error:
        raise unknown_key_of(key, error) from None
