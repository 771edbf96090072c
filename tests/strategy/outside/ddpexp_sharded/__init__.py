"""A strategy of another package: parameters, gradients and optimizer state sharded by torch's FSDP2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ddpexp.strategy.options import Options


@dataclass(frozen=True)
class ShardedOptions(Options):
    """Options of the strategy; free of torch."""

    builder: ClassVar[str] = "ddpexp_sharded.strategy:build"
    estimator: ClassVar[str] = "ddpexp_sharded.estimator:ShardedEstimator"

    kind: Literal["sharded"]
    children: bool
