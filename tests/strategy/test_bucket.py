"""Where a bucket's workers share and where each keeps its own: buffers, and gradients of a micro-batch that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpexp.errors import WorkerError
from ddpexp.launch import WorkerRequest
from ddpexp.launch.launchers.local import Spawn
from tests.conftest import calling

WORKER = """\
import dataclasses

import torch
from torch import nn

from ddpexp.compat import lazy_dynamo
from ddpexp.launch import Layout
from ddpexp.train.process import run_rank
from ddpexp.strategy.ddp_options import DDPOptions
from ddpexp.strategy.ddp import DDP
from ddpexp.distributed.world import World

OPTIONS = DDPOptions(
    kind="ddp", find_unused_parameters=False, static_graph=False, gradient_as_bucket_view=True, bucket_cap_mb=25,
    broadcast_buffers=True, reduce_through="auto", comm_hook="none", powersgd_rank=1, sync_batchnorm=False,
)


def main(size):
    def work(control):
        lazy_dynamo.defer()
        torch.set_num_threads(1)
        world = World.join(Layout(1, int(size), "cpu", "gloo", 1))
        for case in (begins, own, failed):
            case(world)
        world.barrier()

    return run_rank(work)


class Counts(nn.Module):
    # Every pass leaves its mark in a buffer, and says what it found there.
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, mark):
        self.found = float(self.count)
        self.count.fill_(mark)
        return self.weight * mark


def begins(world):
    # Rank zero's buffers come at the begin of a step, and not in between.
    rank = world.rank
    model = DDP(OPTIONS, world, Counts)
    assert len(model._buckets) == 1
    module = model.modules["model"]
    module.count.fill_(10 + rank)  # as a checkpoint might leave it

    def found(mark, last):
        with model.micro_batch(last=last):
            model.train_model(mark + rank).sum().backward()
        return module.found

    assert found(20, last=False) == 10
    assert found(30, last=False) == 20 + rank
    assert found(40, last=True) == 30 + rank
    assert found(50, last=True) == 40
    assert found(60, last=False) == 50
    assert found(70, last=True) == 60 + rank
    with torch.no_grad():
        model.train_model(80 + rank)
    assert module.found == 70 + rank  # a pass between the steps brings nothing
    assert found(90, last=True) == 80
    assert found(91, last=True) == 90


def own(world):
    # Buffers that are not shared are rank zero's for a while, and each rank's own again afterwards, error or not.
    model = DDP(dataclasses.replace(OPTIONS, broadcast_buffers=False), world, Counts)
    count = model.modules["model"].count
    count.fill_(5 + world.rank)
    assert {name: float(buffer) for name, buffer in model.local_buffers().items()} == {"model.count": 5 + world.rank}
    with model.synced_buffers():
        assert float(count) == 5
    assert float(count) == 5 + world.rank
    with model.evaluation() as bare:
        assert float(bare.count) == 5
        assert not bare.training
        bare(1)
    assert bare.training
    assert float(count) == 5 + world.rank
    try:
        with model.evaluation():
            raise KeyError
    except KeyError:
        pass
    assert float(count) == 5 + world.rank
    shared = DDP(OPTIONS, world, Counts)
    shared.modules["model"].count.fill_(5 + world.rank)
    assert shared.local_buffers() == {}
    with shared.synced_buffers():
        pass
    assert float(shared.modules["model"].count) == 5


def failed(world):
    # What a micro-batch that failed has left is nobody's business: the error comes out, and no rank waits for another's
    # sum.
    model = DDP(OPTIONS, world, Counts)
    weight = model.modules["model"].weight
    for _ in range(2):
        try:
            with model.micro_batch(last=True):
                model.train_model(1 + world.rank).sum().backward()
                raise KeyError
        except KeyError:
            pass
        assert float(weight.grad) == 1 + world.rank
        model.clear_gradient()
    with model.micro_batch(last=True):
        model.train_model(1 + world.rank).sum().backward()
    assert float(weight.grad) == 1 + (world.world_size - 1) / 2
"""


def test_buffers_are_shared_when_a_step_begins_and_gradients_when_a_micro_batch_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_servers: None
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/buckets.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path / "code")
    try:
        Spawn().launch(calling("buckets:main", ["2"], tmp_path / "logs", WorkerRequest(gpus=2)))
    except WorkerError as error:
        pytest.fail(f"{error.failure.message}\n{error.failure.traceback}")
