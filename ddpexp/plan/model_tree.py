"""The modules of a model as a tree, and the totals: what `ddpexp summary` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Module:
    """A module, with all modules below it."""

    path: str  # as in the names of its parameters; empty: the model itself, if there is one
    kind: str  # its class
    depth: int  # 0: a model
    trainable: int  # numbers in its parameters, those of a tied one once
    frozen: int
    shared: int  # of these, in parameters that other modules have first
    shared_with: Sequence[str]  # the paths of these modules
    same_as: str | None = None  # the path by which the same module stands above
    calls: int | None = None  # in a forward pass; None: unknown
    shapes: Sequence[Sequence[int]] | None = None  # of the tensors that its first call returned
    flops: int | None = None  # of its calls, a sample

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return self.path.rpartition(".")[2] or "model"


@dataclass(frozen=True)
class Summary:
    """The tree from the top, each module before those below it, and the totals. Units: bytes."""

    modules: Sequence[Module]
    trainable: int
    frozen: int
    shared: int  # how much more they would be if no module shared parameters with others
    parameters_bytes: int
    buffers_bytes: int
    samples: int | None  # in the batch that gave the shapes; None: there was none
    forward_flops: int | None  # a sample
    backward_flops: int | None
    activations_bytes: int | None  # a sample
    notes: Mapping[str, str]  # by what they are about

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Summary:
        """Return what `as_dict` was made of."""
        return cls(**{**values, "modules": [Module(**module) for module in values["modules"]]})

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @property
    def depth(self) -> int:
        """Return how many levels of modules are below the models."""
        return max(module.depth for module in self.modules)

    def down_to(self, depth: int) -> Summary:
        """Return the summary without the modules that are further below; their numbers are in those above."""
        return replace(self, modules=[module for module in self.modules if module.depth <= depth])
