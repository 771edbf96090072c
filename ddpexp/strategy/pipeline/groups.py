"""The process groups of a pipeline: of its stages, and of the workers that compute the same stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddpexp.distributed.world import World
from ddpexp.strategy.pipeline.links import Links


@dataclass(frozen=True)
class Groups:
    """The place of a rank in a mesh: stages in one dimension, and workers that share the data in the other."""

    stage: int
    pipe: World  # the stages through which this rank's batches go; ranks are numbered by the stage
    replicas: World  # the ranks with the same stage; ranks are numbered by their data
    links: Links

    @classmethod
    def join(cls, world: World, num_stages: int, channels_last: bool = False) -> Groups:
        """Divide the world; images arrive in the memory format `channels_last`. Ranks: all; communicates."""
        size = world.world_size // num_stages
        stage, data = divmod(world.rank, size)
        pipes = [[number * size + column for number in range(num_stages)] for column in range(size)]
        own = pipes[data]
        pipe = replace(world, rank=stage, world_size=num_stages, memory=None, group=group_of(world, pipes))
        links = Links(
            stage, world.device, group_of(world, pipes), group_of(world, pipes),
            own[stage - 1] if stage else None, own[stage + 1] if stage + 1 < num_stages else None, channels_last,
        )  # fmt: skip
        rows = [[number * size + column for column in range(size)] for number in range(num_stages)]
        replicas = replace(world, rank=data, world_size=size, memory=None, group=group_of(world, rows))
        return cls(stage, pipe, replicas, links)

    def of_stages(self, world: World, stages: Sequence[int]) -> Any:
        """Return the group of some stages of this rank's pipe; None if it is not in it. Ranks: all; communicates."""
        size = self.replicas.world_size
        return group_of(world, [[stage * size + column for stage in stages] for column in range(size)])


def group_of(world: World, lists: Sequence[Sequence[int]]) -> Any:
    """Return the process group of the list of ranks that has this one. Ranks: all, with the same lists."""
    own = None
    for ranks in lists:
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=world.timeout_seconds))
        if world.rank in ranks:
            own = group
    return own
