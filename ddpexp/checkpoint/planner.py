"""The plan of a save: the layout of all files, and what this rank writes; the same from save to save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ddpexp.checkpoint.layout import TensorFile, lay_out, share, ties
from ddpexp.checkpoint.pages import Routing
from ddpexp.checkpoint.staging import Shards
from ddpexp.distributed.world import World


class Planner:
    """Keeps the plan until the tensors are others."""

    def __init__(self, world: World) -> None:
        """Plan nothing yet."""
        self._world = world
        self._signature: Any = None
        self._plan: tuple[list[TensorFile], Routing] | None = None

    def plan(self, files: Mapping[str, Shards]) -> tuple[list[TensorFile], Routing]:
        """Return the layout and this rank's part of it. Ranks: all; communicates if they are on several hosts."""
        world = self._world
        signature = [
            (
                name,
                [(key, s.tensor.dtype, s.shape, s.first_row, s.rows, s.tensor.numel()) for key, s in shards.items()],
                ties({key: shard.tensor for key, shard in shards.items()}),
            )
            for name, shards in files.items()
        ]
        changed = self._signature != signature
        if world.local_world_size < world.world_size:  # ranks of several hosts plan together, all or none
            changed = bool(world.sum(torch.tensor(float(changed), device=world.device)))
        if changed or self._plan is None:
            planned = [lay_out(name, shards) for name, shards in files.items()]
            spans = share(planned, world.rank, world.world_size)
            self._signature, self._plan = signature, (planned, Routing.agreed(spans, world))
        return self._plan
