"""Which modules of a model are gathered as a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import nn

from ddpexp.strategy.module_classes import check_classes

BLOCKS = "strategy.blocks=[{}]"
"""The key as it is typed, for one class."""

_USES_WEIGHTS_OF_CHILDREN = (nn.MultiheadAttention,)
"""Modules that use the weights of a layer in them without calling it, so that it cannot be gathered by itself."""


@runtime_checkable
class NamesBlocks(Protocol):
    """A model that names the classes of its blocks, which `strategy.blocks` overrides."""

    fsdp_blocks: Sequence[str]


def blocks_of(
    models: Mapping[str, nn.Module], classes: Sequence[str] | None, min_bytes: float, compiled: str | None = None
) -> list[nn.Module]:
    """Return the modules that become blocks, inner ones first, the models themselves last.

    These are the modules of the classes or, if there are none, of those that a model names itself, as `NamesBlocks`; or
    else the smallest modules with at least `min_bytes` of parameters that no inner block holds. The last rule cuts no
    module of the class `compiled`, of which the hooks of a block inside would cut the graph.

    Raises:
        RefusedError: there is no module of a class.
    """
    if classes is not None:
        check_classes(models, classes, BLOCKS)
    blocks = []
    for model in models.values():
        named = model.fsdp_blocks if classes is None and isinstance(model, NamesBlocks) else classes
        blocks += _by_class(model, named) if named is not None else _by_size(model, min_bytes, compiled, set())
    roots = [model for model in models.values() if not any(model is block for block in blocks)]
    return [*dict.fromkeys(blocks), *roots]


def _by_class(model: nn.Module, classes: Sequence[str]) -> list[nn.Module]:
    inside_out = reversed(list(model.modules()))  # modules() yields a module before those in it
    return [module for module in inside_out if type(module).__name__ in classes and _can_be_block(module)]


def _by_size(module: nn.Module, min_bytes: float, compiled: str | None, taken: set[int]) -> list[nn.Module]:
    """Return the blocks in a module; adds the parameters that they hold to `taken`."""
    is_whole = isinstance(module, _USES_WEIGHTS_OF_CHILDREN) or type(module).__name__ == compiled
    children = () if is_whole else module.children()
    blocks = [block for child in children for block in _by_size(child, min_bytes, compiled, taken)]
    free = [parameter for parameter in module.parameters() if id(parameter) not in taken]
    if _can_be_block(module) and sum(p.numel() * p.element_size() for p in free) >= min_bytes:
        taken.update(id(parameter) for parameter in free)
        blocks.append(module)
    return blocks


def _can_be_block(module: nn.Module) -> bool:
    """Return whether a module has a forward, in which its parameters are gathered, and any parameters."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict) and any(True for _ in module.parameters())
