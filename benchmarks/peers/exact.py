"""What exact reduction costs a step beside fast, as one of torchrun's ranks: both train in one process, in turn.

`--model deep|lenet|gpt --micro-batches N`; rank zero prints JSON: microseconds of CPU time a step of its main thread,
without what it waits for the others, of each way in the quieter half of its blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.peers import common, gpt
from ddpexp.distributed.world import World
from ddpexp.strategy.ddp import DDP
from ddpexp.strategy.ddp_options import DDPOptions
from ddpexp.strategy.exact.strategy import Exact
from ddpexp.strategy.replica import Replicas

WAYS = ("exact", "fast", "exact again")
_BATCH, _BLOCK, _WARM = 32, 10, 2  # samples of a micro-batch; steps of a block; blocks that are not counted
_OPTIONS = DDPOptions("ddp", False, False, True, 25, True, "shared_memory", "none", 1, False)


def main() -> None:
    """Train in all ways, block by block in a random order."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["deep", "lenet", "gpt"], required=True)
    parser.add_argument("--micro-batches", type=int, default=1, help="of each rank")
    parser.add_argument("--blocks", type=int, default=20, help="of each way")
    words = parser.parse_args()
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    world = World(rank, rank, 0, size, size, torch.device("cpu"))
    steps = {way: _Step(way, words.model, words.micro_batches, world) for way in WAYS}
    dice, spent = random.Random(0), {way: list[float]() for way in WAYS}
    for _ in range(words.blocks + _WARM):
        for way in dice.sample(WAYS, len(WAYS)):
            spent[way].append(steps[way].block())
    if rank == 0:
        halves = {way: sorted(all_of[_WARM:])[: words.blocks // 2] for way, all_of in spent.items()}
        print(json.dumps({way: sum(half) / len(half) * 1e6 for way, half in halves.items()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


class _Step:
    """A model with its strategy and optimizer."""

    def __init__(self, way: str, model: str, micro_batches: int, world: World) -> None:
        self._waited = 0.0
        self._batches, build, self._loss_of = _job(model, micro_batches, world.rank)
        self._strategy: Replicas = (
            DDP(_OPTIONS, world, build)
            if way == "fast"
            else Exact(_OPTIONS, world, build, gradient_accumulation_steps=micro_batches)
        )
        self._optimizer = torch.optim.SGD(self._strategy.eval_model.parameters(), 1e-4)
        memory: Any = self._strategy.memory
        memory.barrier = self._not_counted(memory.barrier)

    def block(self) -> float:
        """Take the steps of a block; return the time of one. Units: seconds."""
        self._waited, begin = 0.0, time.thread_time()
        for _ in range(_BLOCK):
            for number, batch in enumerate(self._batches, start=1):
                with self._strategy.micro_batch(last=number == len(self._batches)):
                    self._loss_of(self._strategy.train_model, batch).backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._optimizer.zero_grad()
        return (time.thread_time() - begin - self._waited) / _BLOCK

    def _not_counted(self, wait: Callable[[], None]) -> Callable[[], None]:
        def waiting() -> None:
            begin = time.thread_time()
            wait()
            self._waited += time.thread_time() - begin

        return waiting


def _job(model: str, micro_batches: int, rank: int) -> tuple[list[Any], Callable[[], nn.Module], Callable[..., Tensor]]:
    """Return the micro-batches of this rank, what builds the model, and its loss."""
    if model == "gpt":
        tokens = gpt.tokens("tiny", _BATCH * micro_batches).long()
        return (
            list(torch.split(tokens, _BATCH)),
            lambda: gpt.model("tiny"),
            lambda net, batch: gpt.loss_of(net, batch, "mean"),
        )
    torch.manual_seed(1 + rank)
    batches = [(torch.rand(_BATCH, 1, 28, 28), torch.randint(10, (_BATCH,))) for _ in range(micro_batches)]
    return (
        batches,
        lambda: common.model(model),
        lambda net, batch: functional.cross_entropy(net(batch[0]), batch[1]),
    )


if __name__ == "__main__":
    main()
