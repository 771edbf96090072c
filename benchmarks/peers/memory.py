"""The memory that data takes in all ranks of a host.

Each rank notes its share of it after some steps of a linear model.

As a task of ddpexp (`task._target_=benchmarks.peers.memory.Weigh`), or by torchrun as a loop whose ranks each hold
their own copy:
`--folder FOLDER --steps N --notes FOLDER`.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.input import BATCH, held


class Net(nn.Sequential):
    """One linear layer. Shapes: (batch, 3, 32, 32) -> (batch, 10)."""

    def __init__(self) -> None:
        """Build it."""
        super().__init__(nn.Flatten(), nn.Linear(3072, 10))


@dataclass(frozen=True)
class Weigh:
    """Classify by the last digit of a label, and note the memory in step `steps`."""

    notes: str
    steps: int
    label_smoothing: float = 0.0
    done: list[None] = field(default_factory=list)

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int, dict[str, tuple[Tensor, int]]]:
        """Return the loss."""
        loss = loss_of(model, *batch)
        self.done.append(None)
        if len(self.done) == self.steps:
            note(self.notes)
        return loss, len(batch[1]), {}


def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Compute the loss, summed."""
    return functional.cross_entropy(model(images), labels % 10, reduction="sum")


def note(folder: str) -> None:
    """Write this process's share of the memory: pages that several processes have count for each in part. Units.

    Bytes.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    found = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    (Path(folder) / os.environ["RANK"]).write_text(str(found))


def main() -> None:
    """Train as one of torchrun's ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--notes", required=True)
    words = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    images, labels, mean, deviation = held(words.folder)
    for _ in range(words.steps):
        rows = torch.randint(len(labels), (BATCH,))
        optimizer.zero_grad()
        loss_of(model, images[rows].float().div_(255).sub_(mean).div_(deviation), labels[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    dist.barrier()
    note(words.notes)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
