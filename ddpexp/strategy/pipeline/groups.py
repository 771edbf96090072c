"""The process groups of a pipeline: of its workers, and of those that compute the same stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from ddpexp.distributed.world import World
from ddpexp.strategy.mesh import Mesh
from ddpexp.strategy.pipeline.links import Links
from ddpexp.strategy.tensor.group import TensorGroup


@dataclass(frozen=True)
class Groups:
    """The place of a rank in the mesh, and the ranks that differ from it in one dimension."""

    place: int  # in its pipe: that of its first stage
    pipe: World  # the workers through which this rank's batches go; ranks are numbered by their place
    replicas: World  # the ranks with the same parameters; ranks are numbered by their data
    shards: World  # of these, the ones that divide the optimizer's state
    tensor: TensorGroup | None  # the ranks that divide the layers of these stages
    links: Links

    @classmethod
    def join(cls, world: World, mesh: Mesh, is_ring: bool, channels_last: bool = False) -> Groups:
        """Divide the world; images arrive in the memory format `channels_last`.

        In a ring the last worker sends to the first one, which has further stages. Ranks: all; communicates.
        """
        place, _, _, within = mesh.place(world.rank)
        pipes = mesh.groups("pp_size")
        groups = [part_of(world, pipes) for _ in range(4 if is_ring else 2)]
        links = Links(groups[:2], groups[2:] or groups[:2], channels_last)
        tensor = None
        if mesh.tp_size > 1:
            layers = part_of(world, mesh.groups("tp_size"))
            tensor = TensorGroup(within, mesh.tp_size, layers, world.device.type != "cpu")
        return cls(
            place,
            part_of(world, pipes),
            part_of(world, mesh.groups("dp_replicate_size", "dp_shard_size")),
            part_of(world, mesh.groups("dp_shard_size")),
            tensor,
            links,
        )


def part_of(world: World, lists: Sequence[Sequence[int]]) -> World:
    """Return the ranks of the list that has this one, as a world of their own; this rank alone if none has it.

    Ranks: all, with the same lists; communicates.
    """
    own, group = [world.rank], None
    for ranks in lists:
        if len(ranks) > 1:
            joined = dist.new_group(list(ranks), timeout=timedelta(seconds=world.timeout_seconds))
            if world.rank in ranks:
                own, group = list(ranks), joined
    return replace(world, rank=own.index(world.rank), world_size=len(own), memory=None, group=group)
