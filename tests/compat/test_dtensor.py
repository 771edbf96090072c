from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddpexp.compat.dtensor import first_row, flattened
from ddpexp.compat.fsdp import AllGather, ReduceScatter


@pytest.fixture(autouse=True)
def third_of_four() -> Iterator[None]:
    """This process is rank 2 of 4 ranks, of which the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield
    dist.destroy_process_group()


def test_the_first_row_of_a_rank() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for rank_rows, placements, row in ((3, (Shard(0), Replicate()), 3), (3, (Replicate(), Shard(0)), 0)):
        tensor = DTensor.from_local(
            torch.zeros(rank_rows, 2), mesh, placements, run_check=False, shape=torch.Size((6, 2)), stride=(2, 1)
        )
        assert first_row(tensor) == row


def test_a_mesh_is_flattened() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "tensor"))
    data = flattened(mesh["replicate", "shard"], "data")
    assert (data.ndim, data.size(), data.get_local_rank()) == (1, 4, 2)
    assert flattened(mesh["shard"], "shard") == mesh["shard"]


def test_the_interfaces_are_those_that_fsdp_takes() -> None:
    assert FSDPModule.set_custom_all_gather.__annotations__["comm"] in ("AllGather", AllGather)
    assert FSDPModule.set_custom_reduce_scatter.__annotations__["comm"] in ("ReduceScatter", ReduceScatter)
    for kind in (AllGather, ReduceScatter):
        assert kind.__abstractmethods__ == {"__call__", "allocate"}
