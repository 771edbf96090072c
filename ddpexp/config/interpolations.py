"""Interpolations within bounds.

A few lines of `${...}` can stand for more values, more text and more time than there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from omegaconf import Container, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddpexp.config import facts
from ddpexp.config.versions import register_resolver
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
    plain = Container.resolve_parse_tree
    resolved = nodes = characters = 0
    deadline = time.process_time() + _SECONDS

    def counted(self: Container, *arguments: Any, **options: Any) -> Any:
        nonlocal resolved, nodes, characters
        resolved += 1
        value = plain(self, *arguments, **options)
        if isinstance(value, Container):
            nodes += _count(value, _NODES - nodes)
        elif isinstance(value, str):
            characters += len(value) if len(value) <= _LONGEST else _CHARACTERS + 1
        if resolved > _RESOLVED or nodes >= _NODES or characters > _CHARACTERS or time.process_time() > deadline:
            raise _Excess
        return value

    Container.resolve_parse_tree = counted  # type: ignore[method-assign]
    try:
        yield
    except (_Excess, RecursionError):
        raise RefusedError(
            f"The configuration refers to itself with ${{...}} so often, or so deeply, that this may have no end: more "
            "than "
            f"{_RESOLVED:,} times, for a text of more than {_LONGEST:,} characters, or for more than {_SECONDS:g} s. "
            f"Write the values themselves."
        ) from None
    finally:
        Container.resolve_parse_tree = plain  # type: ignore[method-assign]


@contextmanager
def only_resolvers(allows: Callable[[tuple[str | int, ...], str], bool]) -> Iterator[dict[tuple[str | int, ...], str]]:
    """Let OmegaConf call only the resolver `facts`, and those for which `allows` returns true, inside the block.

    `allows` gets the place where the reference is written, as names and positions, and the text of the reference, such
    as `oc.env:NAME`. A refused reference stands for an empty text; the result has its text by its place.
    """
    plain = Container._evaluate_custom_resolver
    refused: dict[tuple[str | int, ...], str] = {}

    def evaluate(
        self: Container, key: Any, node: Node, inter_type: str, inter_args: tuple[Any, ...], inter_args_str: Any
    ) -> Any:
        place, name = _place_of(node), f"{inter_type}:{','.join(map(str, inter_args))}"
        if inter_type == "facts" or allows(place, name):
            return plain(self, key, node, inter_type, inter_args, inter_args_str)
        refused.setdefault(place, name)
        return ""

    Container._evaluate_custom_resolver = evaluate  # type: ignore[method-assign]
    try:
        yield refused
    finally:
        Container._evaluate_custom_resolver = plain  # type: ignore[method-assign]


def _place_of(node: Node) -> tuple[str | int, ...]:
    """Return the names and positions that lead to a node from the root."""
    place: list[str | int] = []
    parent = node._get_parent()
    while parent is not None:
        place.append(node._key())
        node, parent = parent, parent._get_parent()
    return tuple(reversed(place))


def resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve the interpolations of a tree.

    Raises:
        RefusedError: there are too many, or one leads to nothing.
    """
    with bounded_interpolations():
        try:
            value = OmegaConf.to_container(OmegaConf.create(dict(values)), resolve=True)
        except OmegaConfBaseException as error:
            raise RefusedError(f"config.yaml cannot be resolved: {str(error).splitlines()[0]}.") from None
    return cast(dict[str, Any], value)


def _count(tree: Container, most: int) -> int:
    """Count the values in a tree, up to `most`, without resolving any."""
    count, waiting = 0, [tree]
    while waiting and count < most:
        content = waiting.pop().__dict__["_content"]
        inner = list(content.values()) if isinstance(content, dict) else content if isinstance(content, list) else []
        count += len(inner)
        waiting += [item for item in inner if isinstance(item, Container)]
    return count
