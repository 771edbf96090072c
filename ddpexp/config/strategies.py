"""The class with the options of each kind of strategy: ours, and those of installed packages."""

from __future__ import annotations

import dataclasses
import importlib

from ddpexp.config.plugins import installed
from ddpexp.config.registry import keys_of, path_of
from ddpexp.errors import RefusedError
from ddpexp.strategy.options import Options


def kinds() -> list[str]:
    """Return the kinds that `strategy.kind` may name."""
    return [*keys_of("strategy"), *installed("strategy")]


def options_of(kind: str) -> type[Options] | None:
    """Return the class with the options of a kind of strategy; None if there is no such kind.

    Raises:
        RefusedError: a package's class cannot be imported, or does not derive from `Options`.
    """
    path = path_of("strategy", kind) if kind in keys_of("strategy") else installed("strategy").get(kind)
    if path is None:
        return None
    module, _, name = path.rpartition(".")
    try:
        options = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise RefusedError(
            f"strategy={kind}: {path} cannot be imported: {type(error).__name__}: {error}. Is its package complete?"
        ) from error
    if not (isinstance(options, type) and issubclass(options, Options) and dataclasses.is_dataclass(options)):
        raise RefusedError(f"strategy={kind}: {path} is not a dataclass derived from ddpexp.strategy.options.Options.")
    return options
