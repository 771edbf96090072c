"""What one rank among many costs: `--what order|setup --world N` prints JSON. The other ranks are not there.

order: its share of the order of samples, as the loop asks for it. setup: it joins torch's fake process group, which
moves nothing, wraps a model and takes its first steps, with its share of the work the same at every world size.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.peers.common import model
from benchmarks.peers.position import Numbers
from ddpexp.compat import lazy_dynamo
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import TrainBatches
from ddpexp.distributed.world import World
from ddpexp.strategy.ddp import DDP
from ddpexp.strategy.ddp_options import DDPOptions

_SAMPLES = 10**9
_SHARE = 32  # samples of a rank in a step
_STEPS = 1024
_CPU = torch.device("cpu")


def order(world_size: int) -> dict[str, float]:
    """Return what a rank's share of the batch plan and of the order takes: of seven ranks, the middle."""

    def batches(rank: int) -> Iterator[object]:
        plan = plan_batches(_SHARE * world_size, _SHARE, world_size)
        return iter(TrainBatches(Numbers(_SAMPLES), plan, rank, 0, _CPU).indices(0, _STEPS))

    list(batches(0))  # what is loaded once is loaded
    found, plans = [], []
    for number in range(7):
        begin = time.perf_counter()
        share = batches(number * (world_size - 1) // 6)
        next(share)
        first = time.perf_counter()
        rest = sum(1 for _ in share)
        found.append((time.perf_counter() - begin) / ((rest + 1) * _SHARE) * 1e9)
        plans.append((first - begin) * 1e6)
    return {"ns a sample": statistics.median(found), "us to the first": statistics.median(plans)}


def setup(world_size: int) -> dict[str, float]:
    """Return what joining, wrapping and the first steps take, and the memory of it."""
    rank = world_size // 2
    lazy_dynamo.defer()
    torch.set_num_threads(1)
    _step(model("lenet"))  # what torch loads with a first step
    before, begin = _peak(), time.perf_counter()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    world = World(rank, rank % 8, rank // 8, world_size, 8, _CPU)
    plan = plan_batches(_SHARE * world_size, _SHARE, world_size)
    next(TrainBatches(Numbers(_SAMPLES), plan, rank, 0, _CPU).steps(0, 2))
    options = DDPOptions("ddp", False, False, True, 25, True, "auto", "none", 1, False)
    strategy = DDP(options, world, lambda: model("lenet"))
    ready = time.perf_counter()
    _step(strategy.train_model)  # DDP lays its buckets out anew after it
    _step(strategy.train_model)
    begun = time.perf_counter()
    for _ in range(10):
        _step(strategy.train_model)
    step = (time.perf_counter() - begun) / 10
    return {"setup ms": (ready - begin) * 1e3, "step ms": step * 1e3, "MiB": (_peak() - before) / 2**10}


def _step(module: torch.nn.Module) -> None:
    module(torch.ones(_SHARE, 1, 28, 28)).sum().backward()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", choices=("order", "setup"), required=True)
    parser.add_argument("--world", type=int, required=True)
    words = parser.parse_args()
    print(json.dumps({"order": order, "setup": setup}[words.what](words.world)))


if __name__ == "__main__":
    main()
