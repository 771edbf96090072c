"""The time from a start to the first batch of a place in the middle of an epoch.

`--way ddpexp|accelerate|text|mixture|shards --samples N`; prints JSON. Everything that can be imported or built before
is not timed. For `text` and `mixture` N is the number of tokens, which are in memory: a disk's speed is not measured.
The samples of `shards` are indices, in the order of `data.shuffle=blocks`.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ddpexp.data.base import IndexData
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import TrainBatches
from ddpexp.data.datasets import Splits
from ddpexp.data.mixture.dataset import mix
from ddpexp.data.tar_shards.dataset import BlockOrder
from ddpexp.data.text.dataset import Windows

_BATCH, _WINDOW = 64, 256


class Numbers(IndexData):
    """As many samples as asked for, without the memory: each is its index."""

    def __init__(self, count: int) -> None:
        """Hold `count` samples."""
        self.count = count

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return the index itself."""
        return torch.tensor(index)

    def fetch(self, indices: torch.Tensor, pinned: bool = False) -> torch.Tensor:
        """Return the indices themselves."""
        return indices


def of_kind(way: str, samples: int) -> Splits:
    """Return data of a kind of ours."""
    if way == "ddpexp":
        return Splits(Numbers(samples), {})
    if way == "shards":
        return Splits(Numbers(samples), {}, BlockOrder(samples, block_samples=1024, window_blocks=16))
    windows = Windows(torch.from_numpy(np.zeros(samples, np.int16)), _WINDOW)
    if way == "text":
        return Splits(windows, {})
    sources = {"a": Splits(windows, {}), "b": Splits(windows, {})}
    return mix(sources, {"a": 0.7, "b": 0.3}, len(windows), _BATCH)


def seconds_of(splits: Splits, seed: int) -> float:
    """Return the time until the first batch at four fifths of an epoch."""
    begin = time.perf_counter()
    plan = plan_batches(_BATCH, "auto", 1)
    batches = TrainBatches(splits.train, plan, 0, seed, torch.device("cpu"), order=splits.order)
    step = batches.steps_per_epoch * 4 // 5
    next(batches.steps(step, step + 1_000_000))
    return time.perf_counter() - begin


def main() -> None:
    """Look for the batch at four fifths of the epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", required=True)
    parser.add_argument("--samples", type=int, required=True)
    words = parser.parse_args()
    if words.way != "accelerate":
        seconds_of(of_kind(words.way, 1_000_000), seed=1)  # loads numpy and starts torch's threads
        print(json.dumps({"seconds": seconds_of(of_kind(words.way, words.samples), seed=0)}))
        return
    numbers: Any = Numbers(words.samples)
    step = words.samples // _BATCH * 4 // 5
    from accelerate import Accelerator
    from accelerate.data_loader import skip_first_batches

    accelerator = Accelerator(cpu=True)
    loader: DataLoader[Any] = accelerator.prepare(DataLoader(numbers, batch_size=_BATCH, shuffle=True))
    begin = time.perf_counter()
    next(iter(skip_first_batches(loader, step)))
    print(json.dumps({"seconds": time.perf_counter() - begin}))


if __name__ == "__main__":
    main()
