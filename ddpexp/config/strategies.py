"""What belongs to each kind of strategy: ours, and those of installed packages."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

from ddpexp.config.plugins import installed
from ddpexp.config.registry import keys_of, path_of
from ddpexp.errors import RefusedError
from ddpexp.strategy.options import Options

if TYPE_CHECKING:
    from ddpexp.strategy.base import Builder
    from ddpexp.strategy.estimator import Estimator


def kinds() -> list[str]:
    """Return the kinds that `strategy.kind` may name."""
    return [*keys_of("strategy"), *installed("strategy")]


def options_of(kind: str) -> type[Options] | None:
    """Return the class with the options of a kind of strategy; None if there is no such kind.

    Raises:
        RefusedError: a package's class cannot be imported, does not derive from `Options`, or names no builder.
    """
    path = path_of("strategy", kind) if kind in keys_of("strategy") else installed("strategy").get(kind)
    if path is None:
        return None
    options = _imported(kind, path)
    if not (isinstance(options, type) and issubclass(options, Options) and dataclasses.is_dataclass(options)):
        raise RefusedError(
            "is not a dataclass derived from ddpexp.strategy.options.Options", key="strategy", value=kind, place=path
        )
    if not options.builder:
        raise RefusedError(
            "names no function that builds the strategy",
            key="strategy",
            value=kind,
            suggestion='Set its class attribute builder, for example builder = "package.strategy:build".',
            place=path,
        )
    return options


def builder_of(options: Options) -> Builder:
    """Return the function that builds a strategy, whose module imports torch.

    Raises:
        RefusedError: a package's function cannot be imported.
    """
    builder: Builder = _imported(options.kind, options.builder.replace(":", "."))
    return builder


def estimator_of(options: Options) -> Estimator:
    """Return the estimates for a strategy.

    Raises:
        RefusedError: a package's class cannot be imported.
    """
    return estimator_class(options.kind, type(options))(options)


def estimator_class(kind: str, options: type[Options]) -> type[Estimator]:
    """Return the class of the estimates for a kind of strategy.

    Raises:
        RefusedError: a package's class cannot be imported.
    """
    estimator: type[Estimator] = _imported(kind, options.estimator.replace(":", "."))
    return estimator


def _imported(kind: str, path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        raise RefusedError(
            f"cannot be imported: {type(error).__name__}: {error}",
            key="strategy",
            value=kind,
            suggestion="Is its package complete?",
            place=path,
        ) from error
