"""A decoder whose layers are divided among workers, in turn with torch's own tools on the same workers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peers import layers
from ddpexp.data.datasets import Arrays, Splits
from ddpexp.train.callbacks.base import Callback, RunView


def model() -> nn.Module:
    """Build the decoder."""
    return layers.model()


def tokens() -> Splits:
    """Return its data."""
    return Splits(train=Arrays([layers.tokens()]), evals={})


class NextToken:
    """Cross entropy of the next token."""

    def step(self, model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int, dict[str, tuple[Tensor, int]]]:
        """Return the sum over all tokens. Shapes: (batch, context + 1)."""
        [rows] = batch if isinstance(batch, list | tuple) else [batch]
        targets = rows[:, 1:]
        return layers.loss_of(model(rows[:, :-1]), targets) * targets.numel(), targets.numel(), {}


class InTurn(Callback):
    """After every block of steps, as many of torch's own loop on the same ranks."""

    communicates = True

    def __init__(self, what: str, stages_per_rank: int, folder: str, block: int) -> None:
        """Take the schedule or `tensor`; the seconds of a step go into the folder."""
        self._what, self._stages, self._block = what, stages_per_rank, block
        self._file, self._loss, self._began = Path(folder) / "blocks.jsonl", layers.Loss(), 0.0
        self._loop: Iterator[None] | None = None

    def on_step(self, run: RunView) -> None:
        """Take a block of the other loop, if it is its turn. Ranks: all; communicates."""
        if run.step % self._block:
            return
        if self._loop is None:
            self._loop = (
                layers.tensor_steps(self._loss)
                if self._what == "tensor"
                else layers.pipeline_steps(self._what, self._stages, self._loss)
            )
        end = _now()
        for _ in islice(self._loop, self._block):
            pass
        theirs = _now() - end
        losses = [None] * run.world_size
        dist.all_gather_object(losses, self._loss.value)
        known = [loss for loss in losses if loss is not None and not math.isnan(loss)]
        if self._began and run.rank == 0:
            with self._file.open("a") as file:
                seconds = [(end - self._began) / self._block, theirs / self._block]
                print(json.dumps({"ours": seconds[0], "theirs": seconds[1], "loss": known[-1]}), file=file)
        self._began = _now()


def _now() -> float:
    dist.barrier()
    return time.perf_counter()
