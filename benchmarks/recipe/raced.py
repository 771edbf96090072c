"""What the peers train, as a user's recipe: their models, and nothing but the loss."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.peers import by_hand, common, on_device
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


class Turns(Loss):
    """The same, and in turn with every block of steps as many of a hand-written loop, in this process.

    So both get the same share of a machine whose speed drifts. Alone: one worker.
    """

    def __init__(self, by_hand: Iterator[None], folder: str, block: int) -> None:
        """Take the other loop, which yields after each step, and how many steps a block has.

        The times go into the folder.
        """
        self._by_hand, self._block, self._calls, self._began = by_hand, block, 0, 0.0
        self._file = Path(folder) / "blocks.jsonl"

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int, dict[str, tuple[Tensor, int]]]:
        """Return the sum over the batch, after a block of the other loop where it is its turn. Shapes: as in `Loss`."""
        if self._calls % self._block == 0:
            end = _now()
            done = len(list(islice(self._by_hand, self._block)))
            theirs = _now() - end
            if self._calls and done == self._block:
                with self._file.open("a") as file:
                    print(json.dumps([(end - self._began) / done, theirs / done]), file=file)
            self._began = _now()
        self._calls += 1
        return super().step(model, batch)


class InTurn(Turns):
    """In turn with the peers' loop by hand."""

    def __init__(self, data: str, order: str, folder: str, model: str, block: int) -> None:
        """Take what that loop's program is told, and how many steps a block has."""
        job = Job(data, order, folder, model, 1)
        network = job.network()
        super().__init__(by_hand.steps(job, 0, network, network, lambda: None, None), folder, block)


class InTurnOnDevice(Turns):
    """In turn with the loop by hand that has its samples on the device."""

    def __init__(self, data: str, order: str, folder: str, model: str, block: int, channels_last: bool) -> None:
        """Take where data and order are, and how many steps a block has."""
        super().__init__(on_device.steps(Path(data), Path(order), Path(folder), model, channels_last), folder, block)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
