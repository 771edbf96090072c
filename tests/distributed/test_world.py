"""A worker's place among the others: harmless alone, and real collectives between real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError, RefusedError, WorkerError
from ddpexp.launch import Layout, WorkerRequest
from ddpexp.launch.launchers.local import Spawn
from tests.conftest import calling
from tests.refusals import is_about, refused

ENTRY = """\
import os

import torch

from ddpexp.launch import Layout
from ddpexp.distributed.world import World


def main(folder, size):
    size = int(size)
    world = World.join(Layout(1, size, "cpu", "gloo", 1))
    assert (world.rank, world.world_size) == (int(os.environ["RANK"]), size), world
    assert (world.local_rank, world.local_world_size, world.node_rank) == (world.rank, size, 0)
    if size > 1:  # what the user has exported stays, and the other is loopback
        assert [os.environ[f"{name}_SOCKET_IFNAME"] for name in ("GLOO", "NCCL")] == ["lo", "ib0"]
    assert world.is_rank_zero == (world.rank == 0)
    mine = torch.tensor([1.0, float(world.rank)])
    assert world.sum(mine) is mine
    assert mine.tolist() == [size, sum(range(size))]
    assert world.broadcast(torch.tensor(world.rank)).item() == 0
    assert world.broadcast(torch.tensor(world.rank), source=size - 1).item() == size - 1
    open(f"{folder}/{world.rank}", "w").close()
    world.barrier()
    assert len(os.listdir(folder)) == size
    world.barrier()
    from ddpexp.launch.workers.control import Control

    Control.from_environ().send("done")
    os._exit(0)
"""


ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.mark.parametrize("size", [1, 3])
def test_real_processes_meet_and_reduce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_servers: None, size: int
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    (tmp_path / "code").mkdir()
    (tmp_path / "seen").mkdir()
    (tmp_path / "code/meets.py").write_text(ENTRY)
    monkeypatch.syspath_prepend(tmp_path / "code")
    job = calling("meets:main", [str(tmp_path / "seen"), str(size)], tmp_path / "logs", WorkerRequest(gpus=size))
    try:
        assert Spawn().launch(job) == 0
    except WorkerError as error:
        pytest.fail(f"{error.failure.message}\n{error.failure.traceback}")


def test_alone_every_method_gives_back_what_it_got() -> None:
    world = World.join(Layout(1, 1, "cpu", "gloo", 1), environ=ALONE)  # no store is used, so no port is needed
    assert (world.rank, world.world_size, world.device) == (0, 1, torch.device("cpu"))
    assert not torch.distributed.is_initialized()
    value = torch.tensor(3.0)
    assert world.sum(value) is value
    assert world.broadcast(value) is value
    world.barrier()
    assert value.item() == 3.0


@pytest.mark.parametrize("operation", ["sum", "broadcast", "all_gather", "all_to_all", "send", "receive"])
def test_a_collective_refuses_what_is_not_on_the_device_of_the_world(operation: str) -> None:
    world, here = World(1, 1, 0, 2, 2, torch.device("meta")), torch.zeros(2)
    others: dict[str, tuple[object, ...]] = {
        "all_gather": ([torch.zeros(2, device="meta"), here], torch.zeros(2, device="meta")),
        "all_to_all": (torch.zeros(2, device="meta"), here), "send": (here, 0), "receive": (here, 0),
    }  # fmt: skip
    with pytest.raises(DdpexpError) as caught:
        getattr(world, operation)(*others.get(operation, (here,)))
    assert is_about(caught.value, "communicate")


def test_a_worker_that_cannot_have_its_gpu_is_refused_with_what_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RefusedError) as caught:
        World.join(Layout(1, 1, "cuda", "nccl", 1), environ={**ALONE, "DDPEXP_GPU": "3"})
    assert is_about(caught.value, "counted")


def test_a_fork_that_cannot_use_cuda_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with refused("initialised"):
        World.join(Layout(1, 1, "cuda", "nccl", 1), environ=ALONE)
