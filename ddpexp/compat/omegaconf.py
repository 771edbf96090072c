"""Names of OmegaConf that are private, or that differ between its releases 2.3 and 2.4.

Private: `omegaconf._utils.get_yaml_loader` of 2.3, `omegaconf._yaml.get_yaml_loader` of 2.4.
Why: OmegaConf has no public way to read one value as it reads its files.
When it goes: `yaml.SafeLoader` with the resolver of floats such as 1e-3 that PyYAML lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import omegaconf
import yaml
from omegaconf import Container, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

OMEGACONF_2_4 = tuple(map(int, omegaconf.__version__.split(".")[:2])) >= (2, 4)

if OMEGACONF_2_4:
    from omegaconf._yaml import get_yaml_loader  # type: ignore[import-not-found, unused-ignore]
else:
    from omegaconf import _utils
    from omegaconf._utils import get_yaml_loader  # type: ignore[attr-defined, unused-ignore]

register_resolver: Any = getattr(OmegaConf, "register_resolver" if OMEGACONF_2_4 else "register_new_resolver")
"""Public, and renamed in 2.4: without 2.3 it is `OmegaConf.register_resolver`."""

__all__ = ["OMEGACONF_2_4", "get_yaml_loader", "register_resolver"]

Place = tuple[str | int, ...]
Evaluate = Callable[[str, tuple[Any, ...], Place, Callable[[], Any]], Any]


@contextmanager
def quick_yaml() -> Iterator[None]:
    """Have OmegaConf read with libyaml, where PyYAML has it: the same values, and the same messages for mistakes.

    Private: `omegaconf._utils.get_yaml_loader` of 2.3, which is replaced.
    Why: it parses in Python, which takes ten times as long: 40 ms of every command. 2.4 reads with libyaml itself.
    When it goes: delete this function with the support of 2.3.
    """
    if OMEGACONF_2_4 or not yaml.__with_libyaml__:
        yield
        return
    _utils.get_yaml_loader = _quick_loader  # OmegaConf 2.3 looks it up for each text
    try:
        yield
    finally:
        _utils.get_yaml_loader = get_yaml_loader


def read_values(text: str) -> Any:
    """Return the values of a text as OmegaConf reads its files: with numbers such as 1e-3, and each key once.

    Raises: yaml.YAMLError.
    """
    return yaml.load(text, Loader=get_yaml_loader() if OMEGACONF_2_4 or not yaml.__with_libyaml__ else _quick_loader())


@cache
def _quick_loader() -> Any:
    slow: Any = get_yaml_loader()

    class Quick(yaml.CSafeLoader, slow):  # type: ignore[misc]
        """What OmegaConf makes of the nodes, from another parser's."""

        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self._stream = stream

        def get_single_data(self) -> Any:
            try:
                return super().get_single_data()
            except yaml.YAMLError:
                if not isinstance(self._stream, str):
                    self._stream.seek(0)
                return slow(self._stream).get_single_data()  # says it in the words that are known

    return Quick


@contextmanager
def observed_interpolations(observe: Callable[[Any], None]) -> Iterator[None]:
    """Call `observe` with the result of every interpolation that OmegaConf resolves inside the block.

    Private: `Container.resolve_parse_tree` of 2.3 and 2.4, which is replaced.
    Why: nothing public sees a result before the next one is made of it.
    When it goes: replace what evaluates an interpolation then; without it a configuration has no bounds.
    """
    plain = Container.resolve_parse_tree

    def observed(self: Container, *arguments: Any, **options: Any) -> Any:
        value = plain(self, *arguments, **options)
        observe(value)
        return value

    Container.resolve_parse_tree = observed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Container.resolve_parse_tree = plain  # type: ignore[method-assign]


@contextmanager
def guarded_resolvers(evaluate: Evaluate) -> Iterator[None]:
    """Have `evaluate` decide about each call of a resolver inside the block.

    It gets the resolver's name, its arguments, where the reference is written, and a function that calls the resolver.
    Private: `Container._evaluate_custom_resolver` of 2.3 and 2.4, which is replaced; `_get_parent` and `_key` of nodes.
    Why: a registered resolver learns neither its name nor the key at which it is used.
    When it goes: refuse every configuration with a resolver that is not restated.
    """
    plain = Container._evaluate_custom_resolver

    def guarded(
        self: Container, key: Any, node: Node, inter_type: str, inter_args: tuple[Any, ...], inter_args_str: Any
    ) -> Any:
        return evaluate(
            inter_type, inter_args, _place_of(node),
            lambda: plain(self, key, node, inter_type, inter_args, inter_args_str),
        )  # fmt: skip

    Container._evaluate_custom_resolver = guarded  # type: ignore[method-assign]
    try:
        yield
    finally:
        Container._evaluate_custom_resolver = plain  # type: ignore[method-assign]


def _place_of(node: Node) -> Place:
    """Return the names and positions that lead to a node from the root."""
    place: list[str | int] = []
    parent = node._get_parent()
    while parent is not None:
        place.append(node._key())
        node, parent = parent, parent._get_parent()
    return tuple(reversed(place))


def tree_of(error: OmegaConfBaseException) -> dict[str, Any]:
    """Return the tree that an error is about, unresolved; empty if it is about none.

    Private: `_get_root` of nodes, 2.3 and 2.4.
    Why: errors carry a node, and not its tree.
    When it goes: suggest only keys beside the unknown one.
    """
    node = error.parent_node
    tree: Any = OmegaConf.to_container(node._get_root(), resolve=False) if isinstance(node, Container) else {}
    return tree if isinstance(tree, dict) else {}


def count_nodes(tree: Container, most: int) -> int:
    """Count the values in a tree, up to `most`, without resolving any.

    Private: `_content` of containers, 2.3 and 2.4.
    Why: the public iterators resolve, and `OmegaConf.to_container` copies everything before it can be counted.
    When it goes: count the result of `OmegaConf.to_container`, with a lower bound.
    """
    count, waiting = 0, [tree]
    while waiting and count < most:
        content = waiting.pop().__dict__["_content"]
        if not isinstance(content, dict | list):
            continue
        inner = list(content.values()) if isinstance(content, dict) else content
        count += len(inner)
        waiting += [item for item in inner if isinstance(item, Container)]
    return count
