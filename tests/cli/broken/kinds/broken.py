"""Recipes with one mistake each, and sound ones, for `ddpexp check`."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.data.datasets import Arrays, IndexData, Splits
from ddpexp.task import OptimizerStep

Batch = tuple[Tensor, Tensor]
Sums = tuple[Tensor, int, dict[str, Any]]


def points(count: int, seed: int) -> Arrays:
    rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return Arrays((rows, (rows.sum(1) > 0).long()))


def load() -> Splits:
    return Splits(points(96, 0), {"eval": points(33, 1)})


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))


class Sound:
    """Counts its calls, which has no effect."""

    def __init__(self) -> None:
        self.calls = 0

    def step(self, model: nn.Module, batch: Batch) -> Sums:
        rows, labels = batch
        self.calls += 1
        scores = model(rows)
        loss = functional.cross_entropy(scores, labels, reduction="sum")
        return loss, len(labels), {"accuracy": ((scores.argmax(1) == labels).sum(), len(labels))}


class Mean(Sound):
    def step(self, model: nn.Module, batch: Batch) -> Sums:
        loss, count, metrics = super().step(model, batch)
        return loss / count, count, metrics


class NotAdditive(Sound):
    def step(self, model: nn.Module, batch: Batch) -> Sums:
        loss, count, _ = super().step(model, batch)
        return loss, count, {"spread": (batch[0].std(), 1)}


class Parts:
    """Two losses, the second over the samples of one class."""

    def step(self, model: nn.Module, batch: Batch) -> Any:
        rows, labels = batch
        each = functional.cross_entropy(model(rows), labels, reduction="none")
        return {"all": (each.sum(), len(labels)), "ones": self.ones(each, labels)}, {}

    def ones(self, each: Tensor, labels: Tensor) -> tuple[Tensor, int | Tensor]:
        return (each * labels).sum(), labels.sum()

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"ones": batch[1].sum()}


class OtherCounts(Parts):
    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"ones": (1 + batch[1]).sum()}


class OtherNames(Parts):
    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {"zeros": batch[1].sum()}


class ByMicroBatch(Parts):
    def ones(self, each: Tensor, labels: Tensor) -> tuple[Tensor, int | Tensor]:
        return (each * labels).sum() / labels.sum(), 1

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {}


class Contrast:
    """A loss over the global batch."""

    def embed(self, model: nn.Module, batch: Batch) -> Tensor:
        embedded: Tensor = model(batch[0])
        return embedded

    def loss(self, model: nn.Module, embeddings: Tensor) -> Sums:
        scores = embeddings @ embeddings.T
        loss = functional.cross_entropy(scores, torch.arange(len(scores)), reduction="sum")
        return loss, len(scores), {}


class ContrastMean(Contrast):
    def loss(self, model: nn.Module, embeddings: Tensor) -> Sums:
        loss, count, metrics = super().loss(model, embeddings)
        return loss / count, count, metrics


class ContrastCentred(Contrast):
    def embed(self, model: nn.Module, batch: Batch) -> Tensor:
        embedded = super().embed(model, batch)
        return embedded - embedded.mean(0)


class Stateful(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.average: Any = 0.0

    def step(self, model: nn.Module, batch: Batch) -> Sums:
        loss, count, metrics = super().step(model, batch)
        if model.training:
            self.average = 0.9 * self.average + 0.1 * float(loss.detach())
        return loss * (1 + self.average), count, metrics


class ByRank(Sound):
    def step(self, model: nn.Module, batch: Batch) -> Sums:
        loss, count, metrics = super().step(model, batch)
        return loss * (1 + int(os.environ["RANK"])), count, metrics


class EvalByRank(Sound):
    def step(self, model: nn.Module, batch: Batch) -> Sums:
        loss, count, metrics = super().step(model, batch)
        return loss * (1 if model.training else 1 + int(os.environ["RANK"])), count, metrics


class PythonRandom(Sound):
    def step(self, model: nn.Module, batch: Batch) -> Sums:
        loss, count, metrics = super().step(model, batch)
        return loss * (1 + random.random()), count, metrics


class Manual(Sound):
    def train_step(self, update: OptimizerStep, batches: Sequence[Batch]) -> Sums:
        for number, batch in enumerate(batches, start=1):
            with update.micro_batch(last=number == len(batches)) as micro_batch:
                losses = self.losses(update.models, batch)
                micro_batch.backward(losses.sum(), len(losses))
        update.apply()
        return losses.sum().detach(), len(losses), {}

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


class ManualByRank(Manual):
    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().losses(model, batch) * (1 + int(os.environ["RANK"]))


class ManualMean(Sound):
    def train_step(self, update: OptimizerStep, batches: Sequence[Batch]) -> Sums:
        for number, (rows, labels) in enumerate(batches, start=1):
            with update.micro_batch(last=number == len(batches)) as micro_batch:
                losses = functional.cross_entropy(update.models(rows), labels, reduction="none")
                micro_batch.backward(losses.mean(), len(losses))
        update.apply()
        return losses.sum().detach(), len(losses), {}


class ByTime(Sound):
    def step(self, model: nn.Module, batch: Batch) -> Sums:
        loss, count, metrics = super().step(model, batch)
        return loss * (1 + time.perf_counter() % 1), count, metrics


class Renaming(Sound):
    def step(self, model: nn.Module, batch: Batch) -> Sums:
        loss, count, metrics = super().step(model, batch)
        return loss, count, metrics if count > 9 else {}


class TooLarge(Sound):
    def step(self, model: nn.Module, batch: Batch) -> Sums:
        loss, count, metrics = super().step(model, batch)
        return loss + torch.zeros(count, 1 << 44).sum(), count, metrics


class Unfinished(Sound):
    def finish(self, sums: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"rate": sums["hits"][0] / sums["loss"][1]}


class Raising(Sound):
    def step(self, model: nn.Module, batch: Batch) -> Sums:
        raise ValueError(f"no {len(batch)}")


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_module("spare", None)
        self.head = nn.Linear(8, 2)

    def forward(self, rows: Tensor) -> Tensor:
        scores: Tensor = rows
        for layer in list(self)[:5]:
            scores = layer(scores)
        return scores


class Counting(nn.Module):
    """Keeps a number that is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.scale = 1.0

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.scale *= 1.5
        scores: Tensor = self.layer(rows) * self.scale
        return scores


class Noisy(Arrays):
    def fetch(self, indices: Tensor, pinned: bool = False) -> Any:
        rows, labels = super().fetch(indices, pinned)
        return rows + torch.from_numpy(np.random.default_rng().normal(size=tuple(rows.shape))).float(), labels


def load_noisy() -> Splits:
    data: IndexData = Noisy(points(96, 0).tensors)
    return Splits(data, {"eval": points(33, 1)})


def networks() -> dict[str, nn.Module]:
    return {"generator": nn.Linear(2, 4), "critic": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))}


class Adversarial:
    """Two networks, as a GAN trains them."""

    def optimizers(self, model: Mapping[str, nn.Module], make: Any) -> dict[str, Any]:
        return {name: make(module.parameters()) for name, module in model.items()}

    def train_step(self, update: OptimizerStep, batches: Sequence[Batch]) -> Sums:
        generator, critic = update.models["generator"], update.models["critic"]
        for number, (rows, _) in enumerate(batches):
            with update.micro_batch(last=number == len(batches) - 1) as micro_batch:
                fake = generator(torch.randn(len(rows), 2)).detach()
                loss = functional.softplus(-critic(rows)).sum() + functional.softplus(critic(fake)).sum()
                micro_batch.backward(loss, len(rows))
        update.apply("critic")
        for number, (rows, _) in enumerate(batches):
            with update.micro_batch(last=number == len(batches) - 1) as micro_batch:
                fooled = functional.softplus(-critic(generator(torch.randn(len(rows), 2)))).sum()
                micro_batch.backward(fooled, len(rows))
        update.apply("generator")
        return loss.detach(), len(rows), {"fooled": (fooled.detach(), len(rows))}

    def step(self, model: Mapping[str, nn.Module], batch: Batch) -> Sums:
        rows, _ = batch
        return functional.softplus(-model["critic"](rows)).sum(), len(rows), {}
