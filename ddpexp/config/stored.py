"""Override the configuration stored in a run directory's config.yaml."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ddpexp.compat.omegaconf import read_values
from ddpexp.config.arguments import Arguments
from ddpexp.config.build import did_you_mean
from ddpexp.config.declared import declared
from ddpexp.config.folders import LISTED, conf_folder, config_dir_of, groups, options
from ddpexp.config.interpolations import hydra_resolver, only_resolvers, resolved
from ddpexp.config.names import check_present
from ddpexp.config.override_checks import check_chosen_once
from ddpexp.config.override_syntax import check_syntax
from ddpexp.config.plugins import plugin_folders
from ddpexp.config.replaced_targets import counts_unlisted, is_in, keys_of_target, typed_targets
from ddpexp.config.resolve import offered_by_packages, text_of, trust_of
from ddpexp.config.restated import Grants, Place, UnrestatedError, leaves, unrestated, value_at_place
from ddpexp.config.schema import Experiment
from ddpexp.config.sentences import first_line, unknown_key_in
from ddpexp.config.validate import ALERT_URL
from ddpexp.errors import RefusedError
from ddpexp.system.files import check_yaml, shortest
from ddpexp.system.yaml_text import RANGE, load_yaml

_IN_LIST = re.compile(r"(?<=[\[,])\s*([^\[\],'\"{}\s]*\$\{oc\.env:[\w.-]+\}[^\[\],'\"{}\s]*)(?=\s*[,\]])")
"""An item with a reference, which YAML takes only in quotes."""


def override_file(path: Path, argv: list[str], keeps: Collection[str] = ()) -> tuple[Mapping[str, Any], str]:
    """Read a run directory's config.yaml and apply overrides to it; also return the result as text.

    The arguments and errors are those of `override_tree`.
    """
    return override_tree(_loaded(path), path, argv, keeps)


def override_tree(
    tree: dict[str, Any], path: Path, argv: list[str], keeps: Collection[str] = ()
) -> tuple[Mapping[str, Any], str]:
    """Apply overrides to the configuration of the run directory in which `path` lies; also return the result as text.

    run.trust and the code folder of the file are ignored and must be restated in `argv`, and run.allow_changes was
    for an earlier start only. `keeps` are those of the sections `launcher` and `logger` that the command uses; in place
    of the others it has launcher=spawn and logger=none. With one of them, other options of all groups can be chosen.

    Raises:
        UnrestatedError: the file has settings that count only when `argv` restates them: see `ddpexp.config.restated`.
        RefusedError: the file is damaged, or an override does not apply to it.
    """
    arguments = Arguments.of(argv)
    config_dir = config_dir_of(arguments.config_dir)
    check_syntax(arguments.overrides)
    chosen = _chosen(arguments.overrides, keeps, config_dir)
    grants = Grants.of(arguments.overrides, tree, config_dir, without=chosen)
    grants = grants.also(_choose(tree, chosen, keeps, config_dir))
    tree["run"] |= {
        "trust": [],
        "code": str(config_dir.parent) if config_dir is not None else None,
        "allow_changes": [],
    }
    if "${" in str(tree["run"].get("dir")):  # nothing reads it: the run is where its file is
        tree["run"]["dir"] = str(path.parent.absolute())
    others = [override for override in arguments.overrides if override.partition("=")[0] not in chosen]
    nodes = _remove_inherited(tree, typed_targets(others))
    for override in others:
        _override(tree, override, is_in(override, nodes) or counts_unlisted(override) or _is_field(override))
    return restated(tree, grants, path)


def restated(tree: dict[str, Any], grants: Grants, path: Path) -> tuple[Mapping[str, Any], str]:
    """Resolve the configuration of the run directory in which `path` lies; also return it as text.

    Raises:
        UnrestatedError: it has settings that `grants` does not cover. RefusedError: it cannot be resolved.
    """
    values, read = _resolved(tree, grants, path)
    if settings := unrestated(values, tree, read, grants):
        raise UnrestatedError(shortest(path.parent), settings)
    if offered := offered_by_packages(values, _searched_packages):
        tree["run"]["trust"] = values["run"]["trust"] = [*(values["run"]["trust"] or ()), *offered]
    check_present(values, trust_of(values))
    return values, text_of(tree)


def _searched_packages() -> Mapping[Path, str]:
    """Return the folders that packages have Hydra search; only for names that nothing else trusts, as Hydra is slow."""
    from ddpexp.config.tree import searched_packages

    return searched_packages()


def _resolved(tree: Mapping[str, Any], grants: Grants, path: Path) -> tuple[dict[str, Any], Mapping[Place, str]]:
    """Return the values, and the resolvers that were refused; no values if they cannot be resolved without these."""

    def allows(place: Place, name: str) -> bool:
        return grants.restates(place) or grants.trusts(name)

    with hydra_resolver({"runtime.cwd": os.getcwd(), "job.name": "ddpexp"}), only_resolvers(allows) as read:
        try:
            return resolved(tree, path), read
        except RefusedError:
            if not read:
                raise
            return {}, read


def _loaded(path: Path) -> dict[str, Any]:
    """Return the configuration in a file, with its references.

    Raises:
        RefusedError: it cannot be read, or is not of sections, which a reference could stand for.
    """
    try:
        check_yaml(path)
        text = path.read_text()
        load_yaml(text)  # refuses tags, which OmegaConf's own loader takes
        tree = read_values(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RefusedError(f"cannot be read: {first_line(error)}", place=path) from None
    if not isinstance(tree, dict) or not isinstance(tree.get("run"), dict):
        raise RefusedError("is not the configuration of a run", place=path)
    for name, section in tree.items():
        if name in Experiment.__dataclass_fields__ and not isinstance(section, dict | None):
            raise RefusedError(f"The key {name} is not a section with keys", place=path)
    if place := next((place for place, value in leaves(tree) if isinstance(value, bytes)), None):
        raise RefusedError(
            f"The value of {'.'.join(map(str, place))} is binary", suggestion="Write a text.", place=path
        )
    return tree


def _chosen(overrides: Sequence[str], keeps: Collection[str], config_dir: Path | None) -> dict[str, str]:
    """Return the options of groups that the overrides choose, and those in place of sections that are not used."""
    chosen_from = (
        groups([folder for folder in (conf_folder(), config_dir) if folder is not None]) if keeps else ["launcher"]
    )
    typed = (override.partition("=") for override in overrides)
    chosen = {key: name for key, _, name in typed if key in chosen_from}
    if "launcher" not in keeps:
        chosen.setdefault("launcher", "spawn")  # whatever the run itself was started with
    if "logger" not in keeps and not any(override.startswith("logger.") for override in overrides):
        chosen.setdefault("logger", "none")
    return chosen


def _choose(
    tree: dict[str, Any], chosen: Mapping[str, str], keeps: Collection[str], config_dir: Path | None
) -> list[Place]:
    """Replace sections by chosen options, and return the places whose values are those of the options."""
    places: list[Place] = []
    for group, name in chosen.items():
        option = _listed(group, name, config_dir) if group in LISTED else _option(group, name, config_dir)
        places += [(group, str(key)) for key in option] if group in LISTED else [(group,)]
        if group == "logger" and group in keeps and isinstance(loggers := tree.get(group), dict):
            option[ALERT_URL] = loggers.get(ALERT_URL)
        tree[group] = option
    return places


def _option(group: str, name: str, config_dir: Path | None = None) -> dict[str, Any]:
    folders = [conf_folder(), *([config_dir] if config_dir is not None else []), *plugin_folders()]
    available = options(group, folders)
    if name not in available:
        suggestion = did_you_mean(name, available, f"{group}=")
        raise RefusedError("is not a known option", key=group, value=name, suggestion=suggestion)
    if group == "recipe":
        raise RefusedError(
            "A run keeps its recipe",
            key="recipe",
            value=name,
            suggestion="Leave it out, or start a new run with another run.dir.",
        )
    file = next(path for folder in folders if (path := folder / group / f"{name}.yaml").is_file())
    option: dict[str, Any] = read_values(file.read_text()) or {}
    if "defaults" in option:
        raise RefusedError(
            "is made of several files",
            key=group,
            value=name,
            suggestion="Type the whole command again, with run.dir=... .",
        )
    return option


def _listed(group: str, names: str, config_dir: Path | None) -> dict[str, Any]:
    """Return the options that `logger=NAMES` or `callbacks=NAMES` chooses: one, or a list in brackets."""
    if group == "callbacks":
        check_chosen_once(names)
    chosen = [name.strip() for name in re.sub(r"^\[(.*)\]$", r"\1", names).split(",")]
    return {key: node for name in filter(None, chosen) for key, node in _option(group, name, config_dir).items()}


def _remove_inherited(tree: Mapping[str, Any], typed: Mapping[str, str]) -> list[str]:
    """Remove the keys of sections whose `_target_` is overridden with another one, and return those sections."""
    others = []
    for name, target in typed.items():
        node = value_at_place(tree, name.split("."))
        if isinstance(node, dict) and node.get("_target_") != target:
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


def _override(tree: dict[str, Any], override: str, adds: bool) -> None:
    """Set the value of a key that is there, or that an override may add."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RefusedError(
            "is not an override", suggestion="Write key=value, for example trainer.gpus=2.", place=override
        )
    try:
        value = text if RANGE.fullmatch(text) else read_values(_IN_LIST.sub(r'"\1"', text))
    except yaml.YAMLError:
        raise RefusedError("is not an override: its value is not YAML", place=override) from None
    *names, last = key.replace("[", ".").replace("]", "").split(".")
    node: Any = tree
    for name in names:
        inner = value_at_place(node, [name])
        if adds and not isinstance(inner, dict | list):
            inner = node[name] = {}
        node = inner
    if isinstance(value_at_place(node, [last]), dict):
        raise RefusedError(
            "replaces a section, and a run keeps its sections",
            suggestion="Change single keys, such as trainer.gpus=2.",
            key=override,
        )
    if isinstance(node, list) and last.isdecimal() and int(last) < len(node):
        node[int(last)] = value
    elif isinstance(node, dict) and (adds or last in node):
        node[last] = value
    else:
        raise unknown_key_in(tree, key)
