"""The order of samples by itself.

The time to the first index, of a whole epoch in batches, and the memory that it takes.

`--way ddpexp|distributed|random --samples N --world W`; prints JSON, of the epochs the fastest, as what else runs on a
machine only makes them slower. Nothing that can be imported before is timed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from ddpexp.data.adapters import MapStyle
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import TrainBatches

_BATCH = 125  # samples of one rank: divides every length and world here, so that every way visits all samples


def main() -> None:
    """Draw an order as rank zero of `--world` would."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=["ddpexp", "distributed", "random"], required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=1, help="0: only the first index")
    words = parser.parse_args()
    torch.set_num_threads(1)
    order = ours if words.way == "ddpexp" else theirs
    next(order(words.way, 1000, 1)(0))  # loads whatever is loaded on the way
    before = _memory("VmRSS", forget=True)
    begin = time.perf_counter()
    batches = order(words.way, words.samples, words.world)
    int(next(batches(0))[0])
    found: dict[str, float] = {"first": time.perf_counter() - begin}
    seconds = []
    for epoch in range(words.epochs):
        begin = time.perf_counter()
        number = sum(1 for _ in batches(epoch))
        seconds.append(time.perf_counter() - begin)
        found["batches"] = number
    found["memory"] = max(4096, _memory("VmHWM") - before)  # a page is the least that can be seen
    if seconds:
        found["epoch"] = min(seconds)
    if seconds and words.samples <= 10**6:
        found["sum"] = sum(int(sum(batch)) for batch in batches(0))
    print(json.dumps(found))


def ours(_way: str, samples: int, world: int) -> Callable[[int], Iterator[Any]]:
    """Return what gives an epoch's batches of indices as a training run computes them."""
    held = TrainBatches(
        MapStyle(range(samples)), plan_batches(_BATCH * world, "auto", world), 0, 0, torch.device("cpu")
    )

    def epoch(number: int) -> Iterator[Any]:
        return held.indices(number * held.steps_per_epoch, (number + 1) * held.steps_per_epoch)

    return epoch


def theirs(way: str, samples: int, world: int) -> Callable[[int], Iterator[Any]]:
    """Return what gives an epoch's batches of indices as a DataLoader takes them."""
    if way == "random":
        batches = BatchSampler(RandomSampler(range(samples)), _BATCH, drop_last=True)
        return lambda _: iter(batches)
    sampler: DistributedSampler[Any] = DistributedSampler(range(samples), world, 0, drop_last=True)  # type: ignore[arg-type]

    def epoch(number: int) -> Iterator[Any]:
        sampler.set_epoch(number)
        return iter(BatchSampler(sampler, _BATCH, drop_last=True))

    return epoch


def _memory(name: str, *, forget: bool = False) -> int:
    """Read one of the kernel's figures of this process's memory; `forget` its peak before. Units: bytes."""
    if forget:
        Path("/proc/self/clear_refs").write_text("5")
    found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(found.split()[1]) * 1024


if __name__ == "__main__":
    main()
