"""The time from a start to the first batch of a place in the middle of an epoch.

`--way ddpexp|accelerate --samples N`; prints JSON. Everything that can be imported or built before is not timed.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import TrainBatches


class Numbers(Dataset[Any]):
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

    def gather(self, indices: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the indices themselves."""
        return indices


def main() -> None:
    """Look for the batch at four fifths of the epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", required=True)
    parser.add_argument("--samples", type=int, required=True)
    words = parser.parse_args()
    step = words.samples // 64 * 4 // 5
    data = Numbers(words.samples)
    if words.way == "ddpexp":
        list(
            TrainBatches(Numbers(10_000), plan_batches(64, "auto", 1), 0, 1, torch.device("cpu")).steps(3, 4)
        )  # loads numpy
        begin = time.perf_counter()
        batches = TrainBatches(data, plan_batches(64, "auto", 1), 0, 0, torch.device("cpu"))
        next(batches.steps(step, step + 1_000_000))
        print(json.dumps({"seconds": time.perf_counter() - begin}))
        return
    from accelerate import Accelerator
    from accelerate.data_loader import skip_first_batches

    accelerator = Accelerator(cpu=True)
    loader: DataLoader[Any] = accelerator.prepare(DataLoader(data, batch_size=64, shuffle=True))
    begin = time.perf_counter()
    next(iter(skip_first_batches(loader, step)))
    print(json.dumps({"seconds": time.perf_counter() - begin}))


if __name__ == "__main__":
    main()
