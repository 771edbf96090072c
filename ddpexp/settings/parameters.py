"""Keys of the trainer that choose parameters by name: groups, layer-wise rates, what is frozen, adapters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from ddpexp.settings.key import Key

Patterns = str | tuple[str, ...]


def as_tuple(patterns: Patterns) -> tuple[str, ...]:
    """Return one or several patterns as several."""
    return (patterns,) if isinstance(patterns, str) else patterns


@dataclass(frozen=True)
class ParamGroup:
    """An entry of trainer.param_groups: the parameters that meet all its conditions get its settings."""

    match: Patterns = ()  # globs on names; one of them must match
    ndim: int | tuple[int, ...] = ()
    type: Patterns = ()  # globs on the classes of the layers that hold a parameter
    name: str | None = None  # of the group, in records; None: made from the conditions
    lr_scale: Annotated[float | None, Key(at_least=0, below=math.inf)] = None  # times optimizer.lr
    settings: Mapping[str, Any] = field(default_factory=dict, metadata={"rest": True})  # of the optimizer

    @property
    def patterns(self) -> tuple[str, ...]:
        """Return the globs on names."""
        return as_tuple(self.match)

    @property
    def dimensions(self) -> tuple[int, ...]:
        """Return the numbers of dimensions."""
        return self.ndim if isinstance(self.ndim, tuple) else (self.ndim,)

    @property
    def types(self) -> tuple[str, ...]:
        """Return the globs on classes."""
        return as_tuple(self.type)

    def conditions(self) -> str:
        """Return the conditions as they are typed."""
        given = {"match": self.patterns, "ndim": self.dimensions, "type": self.types}
        return " ".join(f"{name}=[{','.join(map(str, values))}]" for name, values in given.items() if values)

    def settings_for(self, lr: float) -> dict[str, Any]:
        """Return the settings of the optimizer for the parameters of this entry; `lr` is optimizer.lr."""
        scaled = {} if self.lr_scale is None else {"lr": lr * self.lr_scale}
        lists = {name: tuple(value) if isinstance(value, list) else value for name, value in self.settings.items()}
        return {**scaled, **lists}


@dataclass(frozen=True)
class LayerDecay:
    """Learning rates that fall from layer to layer, from the output to the input."""

    decay: Annotated[float, Key(above=0, below=1)]  # what the learning rate is multiplied by from layer to layer
    layers: Patterns  # globs on names of modules, from the input to the output


@dataclass(frozen=True)
class FreezeUntil:
    """Parameters whose gradients are dropped before a step."""

    step: Annotated[int, Key(at_least=1)]
    match: Patterns

    @property
    def patterns(self) -> tuple[str, ...]:
        """Return the globs on names."""
        return as_tuple(self.match)


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters on linear layers."""

    match: Patterns  # globs on names of layers
    rank: Annotated[int, Key(at_least=1)] = 8
    alpha: Annotated[float, Key(above=0, below=math.inf)] = 16.0
    dropout: Annotated[float, Key(at_least=0, below=1)] = 0.0
    train: Patterns = ()  # globs on names of parameters that are trained as a whole

    @property
    def patterns(self) -> tuple[str, ...]:
        """Return the globs on names of layers."""
        return as_tuple(self.match)

    @property
    def trained(self) -> tuple[str, ...]:
        """Return the globs on names of parameters that are trained as a whole."""
        return as_tuple(self.train)

    @property
    def scale(self) -> float:
        """Return what the product of the two matrices is multiplied by."""
        return self.alpha / self.rank
