"""Resolve a composed tree: into plain values, and the text of a run's config.yaml."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from omegaconf import Container, OmegaConf
from omegaconf.resolvers import oc

from ddpexp.compat.omegaconf import register_resolver
from ddpexp.config import facts
from ddpexp.config.instantiate import Trust
from ddpexp.config.interpolations import (
    bounded_interpolations,
    hydra_resolver,
    hydra_values,
    replace_hydra_references,
)
from ddpexp.config.names import check_present, named
from ddpexp.config.plugins import offered_targets
from ddpexp.config.sentences import one_sentence
from ddpexp.config.trusted import covered
from ddpexp.config.value_checks import check_values, warnings_of
from ddpexp.system.secrets import with_references
from ddpexp.system.yaml_text import load_yaml

if TYPE_CHECKING:  # a stored configuration is resolved without Hydra
    from ddpexp.config.tree import Tree


@dataclass(frozen=True)
class ResolvedConfig:
    """A composed and resolved configuration: plain values, and what they were composed from."""

    values: Mapping[str, Any]  # resolved
    text: str  # YAML, resolved but for references to the environment, which may be secrets
    overrides: tuple[str, ...]  # as typed
    warnings: tuple[str, ...]


def resolve(tree: Tree, directory: Path | None = None, job: Mapping[str, Any] = MappingProxyType({})) -> ResolvedConfig:
    """Resolve a tree and check what only its values show.

    For a job of a sweep, `directory` is its run directory, and `job` has its own values of `${hydra:...}`.

    Raises:
        RefusedError: a value of another type, a name that is not defined, a file that grants trust, or one that the
            command chooses and that an option of ours hides.
    """
    unresolved = {name: section for name, section in tree.values.items() if name != "sweep"}
    of_hydra = {**hydra_values(tree.hydra, tree.overrides), **job}
    with one_sentence(), bounded_interpolations(), hydra_resolver(of_hydra):
        values, written = _resolve_twice(unresolved, of_hydra)
    check_values(values, tree)
    for resolved in (values, written):
        resolved["run"]["code"] = str(tree.config_dir.parent) if tree.config_dir else None
        if directory is not None:
            resolved["run"]["dir"] = str(directory)
        resolved.setdefault("recipe", {}).setdefault("name", tree.choices.get("recipe", "run"))
    if offered := offered_by_packages(values, lambda: tree.packages):
        values["run"]["trust"] = written["run"]["trust"] = [*(values["run"]["trust"] or ()), *offered]
    check_present(values, trust_of(values))
    return ResolvedConfig(values, text_of(written), tree.overrides, warnings_of(tree))


def resolved_at(tree: Tree, *keys: str) -> list[Any]:
    """Resolve single keys of a tree, such as `hydra.sweep.dir`; what is not there is None.

    Raises:
        RefusedError: a reference leads to nothing.
    """
    cfg = OmegaConf.create({**tree.values, "hydra": dict(tree.hydra)})
    with one_sentence(), bounded_interpolations(), hydra_resolver(hydra_values(tree.hydra, tree.overrides)):
        nodes = [OmegaConf.select(cfg, key) for key in keys]
        return [OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node for node in nodes]


def text_of(tree: Mapping[str, Any]) -> str:
    """Return a configuration as YAML, with references to the environment for all its secrets.

    Raises:
        RefusedError: no reference can stand for one of them.
    """
    return OmegaConf.to_yaml(OmegaConf.create(with_references(tree)))


def text_with_facts(text: str, data_facts: Mapping[str, Any]) -> str:
    """Return the text of a configuration with the facts of the data in place of the references to them."""
    return text_of(facts.resolve(load_yaml(text), data_facts)) if facts.refers(text) else text


def _resolve_twice(values: Mapping[str, Any], of_hydra: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the resolved values, and those for config.yaml.

    A value that reads the environment, directly or through other keys, stays a reference there. `of_hydra` are the
    values of `${hydra:...}`, which only this command knows.
    """
    cfg = OmegaConf.create(dict(values))
    with _reads_of_environment() as reads:

        def resolve(value: Any, read: Callable[[], Any]) -> tuple[Any, Any]:
            if isinstance(value, dict):
                pairs = {key: resolve(inner, partial(_item, read, key)) for key, inner in value.items()}
                return {key: pair[0] for key, pair in pairs.items()}, {str(key): pair[1] for key, pair in pairs.items()}
            if isinstance(value, list):
                items = [resolve(inner, partial(_item, read, index)) for index, inner in enumerate(value)]
                return [item[0] for item in items], [item[1] for item in items]
            if not isinstance(value, str) or ("${" not in value and value != "???"):
                return value, value
            reads.clear()
            node = read()  # refuses a missing value
            plain = (
                OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
                if isinstance(node, Container)
                else node
            )
            stays_reference = reads or "${" in facts.without_references(str(plain))
            return plain, replace_hydra_references(value, of_hydra) if stays_reference else plain

        return resolve(dict(values), lambda: cfg)


def _item(read: Callable[[], Any], key: Any) -> Any:
    return read()[key]


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


def offered_by_packages(values: Mapping[str, Any], packages: Callable[[], Mapping[Path, str]]) -> list[str]:
    """Return the names in a configuration that are trusted without `run.trust`.

    They are those that an installed package's own configs use, and those that the user has trusted once. `packages`
    returns the folders that packages have Hydra search, each with its top-level package.
    """
    trust = trust_of(values)
    foreign = {
        str(name) for key, name in named(values).items() if not trust.allows(str(name), key.removesuffix("._target_"))
    }
    return sorted((foreign & offered_targets(tuple(packages().items()))) | covered(foreign)) if foreign else []


def trust_of(values: Mapping[str, Any]) -> Trust:
    """Return whose code a configuration may name."""
    run = values["run"]
    prefixes = run["trust"] if isinstance(run["trust"], list) else ()  # parse refuses another type
    return Trust(tuple(map(str, prefixes)), Path(run["code"]) if run["code"] else None)
