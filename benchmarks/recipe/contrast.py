"""Two towers and a contrastive loss over the global batch, in two passes of ddpexp's and in two by hand."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from ddpexp.data.datasets import Arrays, Splits
from ddpexp.task import OptimizerStep, Sums

_WAYS = ("built in", "again", "by hand")


class Towers(nn.Module):
    """Two towers for two views of a sample, and the scale of their products, which only the loss reads."""

    def __init__(self) -> None:
        """Build both."""
        super().__init__()
        self.one, self.other = _tower(), _tower()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Embed both halves of each row. Shapes: (batch, 256) to two of (batch, 64)."""
        one, other = rows.chunk(2, dim=1)
        return normalize(self.one(one), dim=1), normalize(self.other(other), dim=1)


def _tower() -> nn.Module:
    return nn.Sequential(
        nn.Linear(128, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64)
    )


def rows() -> Splits:
    """Return random rows."""
    return Splits(train=Arrays([torch.randn(4096, 256, generator=torch.Generator().manual_seed(0))]), evals={})


class InTurn:
    """Takes each step in one of the ways, shuffled so that every way has the same number of steps in a block."""

    def __init__(self, folder: str, block: int) -> None:
        """Take where the CPU time of a step goes, and the number of steps of each way in a block."""
        self._file, self._block = Path(folder) / "blocks.jsonl", block
        self._seconds = dict.fromkeys(_WAYS, 0.0)
        self._order: list[str] = []

    def embed(self, model: Any, batch: tuple[Tensor]) -> tuple[Tensor, Tensor]:
        """Return both towers' rows."""
        one, other = model(batch[0])
        return one, other

    def loss(self, model: Any, embeddings: tuple[Tensor, Tensor]) -> Sums:
        """Tell each row of one tower from all rows of the other."""
        one, other = embeddings
        scores = one @ other.T * model.scale.exp()
        labels = torch.arange(len(scores))
        both = cross_entropy(scores, labels, reduction="sum") + cross_entropy(scores.T, labels, reduction="sum")
        return both / 2, len(scores), {}

    def train_step(self, update: OptimizerStep, batches: list[tuple[Tensor]]) -> Sums:
        """Take one step. Ranks: all, in the same way."""
        if not self._order:
            self._order = [way for way in _WAYS for _ in range(self._block)]
            random.Random(update.step).shuffle(self._order)
        way = self._order.pop()
        begin = time.process_time()
        loss = self._by_hand(update, batches) if way == "by hand" else update.backward(batches)[0]
        update.apply()
        self._seconds[way] += time.process_time() - begin
        if not self._order and update.world.is_rank_zero:
            with self._file.open("a") as file:
                print(json.dumps({way: seconds / self._block for way, seconds in self._seconds.items()}), file=file)
            self._seconds = dict.fromkeys(_WAYS, 0.0)
        return loss, 1, {}

    def _by_hand(self, update: OptimizerStep, batches: list[tuple[Tensor]]) -> Tensor:
        """Embed all rows, compute the slopes of their loss, and embed them again for the gradient."""
        model, world = update.models, update.world
        firsts, parts = [], []
        for batch in batches:
            with update.micro_batch(last=False) as micro_batch, torch.no_grad():
                parts.append(self.embed(model, batch))
            firsts.append(micro_batch)
        one, other = (world.gather(torch.cat(tower)).requires_grad_() for tower in zip(*parts, strict=True))
        loss, _, _ = self.loss(model, (one, other))
        *slopes, scale = torch.autograd.grad(loss, [one, other, model.scale])
        begin = world.rank * sum(len(part[0]) for part in parts)
        for number, (first, batch) in enumerate(zip(firsts, batches, strict=True), start=1):
            with first.repeat(last=number == len(batches)) as micro_batch:
                towers, end = self.embed(model, batch), begin + len(batch[0])
                share = sum((tower * slope[begin:end]).sum() for tower, slope in zip(towers, slopes, strict=True))
                micro_batch.backward(share + model.scale * scale * float(begin == 0), len(batch[0]))
            begin = end
        return loss.detach()
