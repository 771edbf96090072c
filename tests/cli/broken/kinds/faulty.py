"""More recipes with one mistake each, for `ddpexp check`: state that ranks share, steps of their own, last batches."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.task import OptimizerStep

from . import broken
from .broken import Batch, Manual, Net, Sound, Sums


class Seen(Net):
    """Counts in a buffer the samples that its own rank has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.seen += (rows.sum(1) > 0).long().bincount(minlength=2)
        return super().forward(rows)


class RankMemory(Sound):
    """Rank 1 alone remembers what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = 0.0

    def step(self, model: nn.Module, batch: Batch) -> Sums:
        loss, count, metrics = super().step(model, batch)
        scale = 1 + self.memory
        if os.environ["RANK"] == "1" and model.training:
            self.memory += 0.5
        return loss * scale, count, metrics


class OwnGenerator(Sound):
    """Draws from a generator that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def step(self, model: nn.Module, batch: Batch) -> Sums:
        loss, count, metrics = super().step(model, batch)
        return loss * (1 + torch.rand((), generator=self.generator)) if model.training else loss, count, metrics


class ByWorld(Sound):
    def step(self, model: nn.Module, batch: Batch) -> Sums:
        loss, count, metrics = super().step(model, batch)
        return loss / int(os.environ["WORLD_SIZE"]), count, metrics


class CountByData(Sound):
    def step(self, model: nn.Module, batch: Batch) -> Sums:
        loss, _, metrics = super().step(model, batch)
        return loss, int((batch[0] > 0).sum()) if model.training else len(batch[1]), metrics


class Detached(Sound):
    def step(self, model: nn.Module, batch: Batch) -> Sums:
        loss, count, metrics = super().step(model, batch)
        return loss.detach(), count, metrics


class FixedSize(Sound):
    """Takes batches of 12 alone."""

    def step(self, model: nn.Module, batch: Batch) -> Sums:
        return super().step(model, (batch[0].view(12, 4), batch[1]))


class UnevenRounds(Manual):
    """Makes as many rounds as the data says."""

    def train_step(self, update: OptimizerStep, batches: Sequence[Batch]) -> Sums:
        for _ in range(1 + int((batches[0][0] > 0).sum()) % 3):
            sums = super().train_step(update, batches)
        return sums


class NoApply(Manual):
    def train_step(self, update: OptimizerStep, batches: Sequence[Batch]) -> Sums:
        for number, batch in enumerate(batches, start=1):
            with update.micro_batch(last=number == len(batches)) as micro_batch:
                losses = self.losses(update.models, batch)
                micro_batch.backward(losses.sum(), len(losses))
        return losses.sum().detach(), len(losses), {}


class ManualState(Manual):
    """Adapts a weight of the loss, which no checkpoint holds."""

    weight: Any = 1.0

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        losses = super().losses(model, batch)
        self.weight = 0.5 * self.weight + 0.5 * float(losses.detach().mean())
        return losses * self.weight


class ManualByWorld(Manual):
    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().losses(model, batch) / int(os.environ["WORLD_SIZE"])


class Forgotten(broken.Adversarial):
    """Never goes back through the loss of the generator."""

    def train_step(self, update: OptimizerStep, batches: Sequence[Batch]) -> Sums:
        generator, critic = update.models["generator"], update.models["critic"]
        for number, (rows, _) in enumerate(batches):
            with update.micro_batch(last=number == len(batches) - 1) as micro_batch:
                fake = generator(torch.randn(len(rows), 2)).detach()
                loss = functional.softplus(-critic(rows)).sum() + functional.softplus(critic(fake)).sum()
                micro_batch.backward(loss, len(rows))
        update.apply("critic")
        return loss.detach(), len(rows), {}


class ManualSpread(Manual):
    """Returns a metric of its evaluation that is no sum."""

    def step(self, model: nn.Module, batch: Batch) -> Sums:
        loss, count, _ = super().step(model, batch)
        return loss, count, {"spread": (batch[0].std(), 1)}


class Names(Sound):
    """Names a metric by what is in the batch."""

    def step(self, model: nn.Module, batch: Batch) -> Sums:
        loss, count, metrics = super().step(model, batch)
        return loss, count, metrics if model.training else {f"of_{int(batch[0].sum() * 1000)}": (count, count)}


class Finished(Sound):
    def finish(self, sums: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"rate": 1 / 0}
