"""What the peers train, as a user's recipe: their models, and nothing but the loss."""

from __future__ import annotations

import json
import time
from itertools import islice
from pathlib import Path

from torch import Tensor, nn
from torch.nn import functional

from benchmarks.peers import by_hand, common
from benchmarks.peers.job import Job


def model(name: str) -> nn.Module:
    """Build the peers' model, with their weights."""
    return common.model(name)


class Loss:
    """Cross entropy alone, as in the peers' loops."""

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int, dict[str, tuple[Tensor, int]]]:
        """Return the sum over the batch. Shapes: images (batch, 1, 28, 28), labels (batch,)."""
        images, labels = batch
        return functional.cross_entropy(model(images), labels, reduction="sum"), len(labels), {}


class InTurn(Loss):
    """The same, and in turn with every block of steps as many of the hand-written loop, in this process.

    So both get the same share of a machine whose speed drifts. Alone: one worker.
    """

    def __init__(self, data: str, order: str, folder: str, model: str, block: int) -> None:
        """Take what the hand-written loop's program is told, and how many steps a block has."""
        job, self._block, self._calls, self._began = Job(data, order, folder, model, 1), block, 0, 0.0
        network = job.network()
        self._by_hand = by_hand.steps(job, 0, network, network, lambda: None, None)
        self._file = Path(folder) / "blocks.jsonl"

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int, dict[str, tuple[Tensor, int]]]:
        """Return the sum over the batch, after a block of the other loop where it is its turn. Shapes: as in `Loss`."""
        if self._calls % self._block == 0:
            end = time.perf_counter()
            done = len(list(islice(self._by_hand, self._block)))
            theirs = time.perf_counter() - end
            if self._calls and done == self._block:
                with self._file.open("a") as file:
                    print(json.dumps([(end - self._began) / done, theirs / done]), file=file)
            self._began = time.perf_counter()
        self._calls += 1
        return super().step(model, batch)
