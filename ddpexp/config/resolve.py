"""Resolve a composed tree: into plain values, and the text of a run's config.yaml."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import getitem
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.resolvers import oc

from ddpexp.compat.omegaconf import register_resolver
from ddpexp.config import facts
from ddpexp.config.hydra_section import answers_of, written_out
from ddpexp.config.instantiate import Trust
from ddpexp.config.interpolations import answered, bounded_interpolations
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
class Composed:
    """A composed configuration: plain values, and what they were composed from."""

    values: Mapping[str, Any]  # resolved
    text: str  # YAML, resolved but for references to the environment, which may be secrets
    overrides: tuple[str, ...]  # as typed
    warnings: tuple[str, ...]


def resolve(tree: Tree, directory: Path | None = None, job: Mapping[str, Any] = MappingProxyType({})) -> Composed:
    """Resolve a tree and check what only its values show.

    Of a job of a sweep, `directory` is the run directory, and `job` has its answers to `${hydra:...}`.

    Raises:
        RefusedError: a value of another type, a name that is not defined, a file that grants trust, or one that the
            command chooses and that an option of ours hides.
    """
    cfg = OmegaConf.create({name: section for name, section in tree.values.items() if name != "sweep"})
    answers = {**answers_of(tree.hydra, tree.overrides), **job}
    with one_sentence(), bounded_interpolations(), answered(answers):
        values, written = plain(cfg), _resolved_but_secrets(cfg, answers)
    check_values(values, tree)
    for resolved in (values, written):
        resolved["run"]["code"] = str(tree.added.parent) if tree.added else None
        if directory is not None:
            resolved["run"]["dir"] = str(directory)
        resolved.setdefault("recipe", {}).setdefault("name", tree.choices.get("recipe", "run"))
    if offered := offered_by_packages(values, lambda: tree.packages):
        values["run"]["trust"] = written["run"]["trust"] = [*(values["run"]["trust"] or ()), *offered]
    check_present(values, trust_of(values))
    return Composed(values, text_of(written), tree.overrides, warnings_of(tree))


def resolved_at(tree: Tree, *keys: str) -> list[Any]:
    """Resolve single keys of a tree, such as `hydra.sweep.dir`; what is not there is None.

    Raises:
        RefusedError: a reference leads to nothing.
    """
    cfg = OmegaConf.create({**tree.values, "hydra": dict(tree.hydra)})
    with one_sentence(), bounded_interpolations(), answered(answers_of(tree.hydra, tree.overrides)):
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


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Return the resolved values; a missing one raises OmegaConf's error."""
    values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    return {str(key): value for key, value in cast(dict[Any, Any], values).items()}


def _resolved_but_secrets(cfg: DictConfig, answers: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve the tree, but leave as written what reads the environment, directly or through other keys.

    `answers` are the values of `${hydra:...}`, which only this command knows.
    """
    with _reads_of_environment() as reads:

        def without_secrets(raw: Any, read: Callable[[], Any]) -> Any:
            if isinstance(raw, dict):
                return {str(key): without_secrets(inner, partial(getitem, read(), key)) for key, inner in raw.items()}
            if isinstance(raw, list):
                return [without_secrets(inner, partial(getitem, read(), index)) for index, inner in enumerate(raw)]
            if not isinstance(raw, str) or "${" not in raw:
                return raw
            reads.clear()
            value = read()
            plain = OmegaConf.to_container(value, resolve=True) if isinstance(value, Container) else value
            return written_out(raw, answers) if reads or "${" in facts.without_references(str(plain)) else plain

        tree: dict[str, Any] = without_secrets(OmegaConf.to_container(cfg, resolve=False), lambda: cfg)
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
