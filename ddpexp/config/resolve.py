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
    unresolved = {name: section for name, section in tree.values.items() if name != "sweep"}
    answers = {**answers_of(tree.hydra, tree.overrides), **job}
    with one_sentence(), bounded_interpolations(), answered(answers):
        values, written = _with_and_without_secrets(unresolved, answers)
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


def _with_and_without_secrets(values: Mapping[str, Any], answers: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the resolved values, and those as they are written down.

    What reads the environment, directly or through other keys, stays a reference there. `answers` are the values of
    `${hydra:...}`, which only this command knows.
    """
    cfg = OmegaConf.create(dict(values))
    with _reads_of_environment() as reads:

        def resolved(value: Any, read: Callable[[], Any]) -> tuple[Any, Any]:
            if isinstance(value, dict):
                pairs = {key: resolved(inner, partial(_item, read, key)) for key, inner in value.items()}
                return {key: pair[0] for key, pair in pairs.items()}, {str(key): pair[1] for key, pair in pairs.items()}
            if isinstance(value, list):
                items = [resolved(inner, partial(_item, read, index)) for index, inner in enumerate(value)]
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
            is_open = reads or "${" in facts.without_references(str(plain))
            return plain, written_out(value, answers) if is_open else plain

        return resolved(dict(values), lambda: cfg)


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
