"""Interpolations within bounds.

A few lines of `${...}` can stand for more values, more text and more time than there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddpexp.compat.omegaconf import (
    Place,
    count_nodes,
    guarded_resolvers,
    observed_interpolations,
    register_resolver,
)
from ddpexp.config import facts
from ddpexp.config.hydra_section import answer
from ddpexp.config.sentences import refusal
from ddpexp.errors import RefusedError

_RESOLVED, _NODES = 10_000, 200_000
_CHARACTERS, _LONGEST = (
    8 << 20,
    1 << 16,
)  # of all texts, and of one: of that the next is made of, before it can be counted
_SECONDS = 3.0  # of this process's own work, however busy the machine is


class _Excess(BaseException):
    """A bound is reached; no `Exception`, of which OmegaConf would make another one."""


@contextmanager
def bounded_interpolations() -> Iterator[None]:
    """Have OmegaConf resolve no more than a configuration needs, in all that is done inside.

    Raises:
        RefusedError: there is more.
    """
    register_resolver("facts", facts.reference, replace=True)
    resolved = nodes = characters = 0
    deadline = time.process_time() + _SECONDS

    def count(value: Any) -> None:
        nonlocal resolved, nodes, characters
        resolved += 1
        if isinstance(value, Container):
            nodes += count_nodes(value, _NODES - nodes)
        elif isinstance(value, str):
            characters += len(value) if len(value) <= _LONGEST else _CHARACTERS + 1
        if resolved > _RESOLVED or nodes >= _NODES or characters > _CHARACTERS or time.process_time() > deadline:
            raise _Excess

    try:
        with observed_interpolations(count):
            yield
    except (_Excess, RecursionError):
        raise RefusedError(
            "The configuration refers to itself with ${...} so often, or so deeply, that this may have no "
            f"end: more than {_RESOLVED:,} times, for a text of more than {_LONGEST:,} characters, or for "
            f"more than {_SECONDS:g} s",
            suggestion="Write the values themselves.",
        ) from None


@contextmanager
def answered(answers: Mapping[str, Any]) -> Iterator[None]:
    """Have `${hydra:...}` stand for these answers in what is resolved inside; what else is asked for is refused."""
    register_resolver("hydra", lambda path: answer(answers, path), replace=True)
    try:
        yield
    finally:
        OmegaConf.clear_resolver("hydra")


@contextmanager
def only_resolvers(allows: Callable[[Place, str], bool]) -> Iterator[dict[Place, str]]:
    """Let OmegaConf call only the resolver `facts`, and those for which `allows` returns true, inside the block.

    `allows` gets the place where the reference is written, as names and positions, and the text of the reference, such
    as `oc.env:NAME`. A refused reference stands for an empty text; the result has its text by its place.
    """
    refused: dict[Place, str] = {}

    def evaluate(resolver: str, arguments: tuple[Any, ...], place: Place, call: Callable[[], Any]) -> Any:
        name = f"{resolver}:{','.join(map(str, arguments))}"
        if resolver == "facts" or allows(place, name):
            return call()
        refused.setdefault(place, name)
        return ""

    with guarded_resolvers(evaluate):
        yield refused


def resolved(values: Mapping[str, Any], place: object = "config.yaml") -> dict[str, Any]:
    """Resolve the interpolations of a tree.

    Raises:
        RefusedError: there are too many, one leads to nothing, or a value is missing.
    """
    with bounded_interpolations():
        try:
            tree = OmegaConf.to_container(OmegaConf.create(dict(values)), resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise RefusedError(f"cannot be resolved: {refusal(error)}", place=place) from None
    return {str(key): value for key, value in cast(dict[Any, Any], tree).items()}
