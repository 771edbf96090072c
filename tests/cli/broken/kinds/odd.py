"""Recipes that look odd and are right, for `ddpexp check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.task import OptimizerStep

from .broken import Batch, Contrast, Manual, Net, Sound, Sums


class OnlyTrains:
    """Has no step: it is never evaluated."""

    def train_step(self, update: OptimizerStep, batches: Sequence[Batch]) -> Sums:
        total, count = torch.zeros((), dtype=torch.float64), 0
        for number, (rows, labels) in enumerate(batches, start=1):
            with update.micro_batch(last=number == len(batches)) as micro_batch:
                loss = functional.cross_entropy(update.models(rows), labels, reduction="sum")
                micro_batch.backward(loss, len(labels))
            total, count = total + loss.detach(), count + len(labels)
        update.apply()
        return total, count, {}


class ThroughStep(Sound):
    """Trains as without a `train_step`, with several losses, which an evaluation does not have."""

    def train_step(self, update: OptimizerStep, batches: Sequence[Batch]) -> Any:
        sums = update.backward(batches)
        update.apply()
        return sums

    def step(self, model: nn.Module, batch: Batch) -> Any:
        loss, count, metrics = super().step(model, batch)
        if not model.training:
            return loss.detach(), count, metrics
        size = model(batch[0]).square().sum()
        return {"side": (loss, torch.tensor(count)), "size": (size, count, 0.5)}, metrics


class Noisy(Contrast):
    """Embeds samples with noise."""

    def embed(self, model: nn.Module, batch: Batch) -> Tensor:
        rows, _ = batch
        embedded: Tensor = model(rows + torch.randn_like(rows))
        return embedded


class Gathers(Contrast):
    """Trains by hand on the loss of all workers' samples."""

    def train_step(self, update: OptimizerStep, batches: Sequence[Batch]) -> Any:
        firsts, parts = [], []
        for batch in batches:
            with update.micro_batch(last=False) as micro_batch, torch.no_grad():
                parts.append(self.embed(update.models, batch))
            firsts.append(micro_batch)
        rows = update.world.gather(torch.cat(parts)).requires_grad_()
        loss, count, metrics = self.loss(update.models, rows)
        [slopes] = torch.autograd.grad(loss, [rows])
        begin = update.world.rank * sum(map(len, parts))
        for number, (first, batch) in enumerate(zip(firsts, batches, strict=True), start=1):
            with first.repeat(last=number == len(batches)) as micro_batch:
                embedded = self.embed(update.models, batch)
                micro_batch.backward((embedded * slopes[begin : begin + len(embedded)]).sum(), len(embedded))
            begin += len(embedded)
        update.apply()
        is_zero = int(update.world.is_rank_zero)
        return loss.detach() * is_zero, count * is_zero, metrics


class Episodes(Sound):
    """Calls the model as often as the data says."""

    def step(self, model: nn.Module, batch: Batch) -> Sums:
        loss, count, metrics = super().step(model, batch)
        for row in batch[0][: int(batch[1].sum())] if model.training else ():
            loss = loss + 0.01 * model[0](row[None]).square().sum()
        return loss, count, metrics


class Steps(Net):
    """Counts its steps in a buffer that is the same on all ranks, and warms up by it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))


class CountsSteps(OnlyTrains):
    def train_step(self, update: OptimizerStep, batches: Sequence[Batch]) -> Sums:
        sums = super().train_step(update, batches)
        update.models.steps.add_(1)
        return sums

    def step(self, model: nn.Module, batch: Batch) -> Sums:
        return Sound().step(model, batch)


class Queue(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(8, 2))


class FillsQueue(CountsSteps):
    """Keeps the means of the last batches of all workers, which the next loss is drawn to."""

    def train_step(self, update: OptimizerStep, batches: Sequence[Batch]) -> Sums:
        count, means = 0, torch.zeros(2, dtype=torch.float64)
        for number, (rows, labels) in enumerate(batches, start=1):
            with update.micro_batch(last=number == len(batches)) as micro_batch:
                scores = update.models(rows)
                loss = functional.cross_entropy(scores, labels, reduction="sum")
                loss = loss + 0.1 * (scores - update.models.queue.mean(0)).square().sum()
                micro_batch.backward(loss, len(labels))
            means, count = means + scores.detach().double().sum(0), count + len(labels)
        update.apply()
        together = update.world.sum(torch.cat([means, torch.tensor([count], dtype=torch.float64)]))
        update.models.queue.copy_(torch.cat([update.models.queue[1:], (together[:2] / together[2]).float()[None]]))
        return loss.detach(), len(labels), {}


class Padded(Sound):
    """Counts as a tensor what depends on the data."""

    def step(self, model: nn.Module, batch: Batch) -> Sums:
        rows, labels = batch
        kept = rows.sum(1) > -1
        losses = functional.cross_entropy(model(rows), labels, reduction="none")
        count: Any = kept.sum()
        return (losses * kept).sum(), count, {}


class Headed(Net):
    def forward(self, rows: Tensor, trains_head: bool = True) -> Tensor:
        linear, norm, bend, _, last = self
        weight, bias = (last.weight, last.bias) if trains_head else (last.weight.detach(), last.bias.detach())
        return functional.linear(bend(norm(linear(rows))), weight, bias)


class Rarely(Manual):
    """Trains its head in every fourth step alone."""

    def train_step(self, update: OptimizerStep, batches: Sequence[Batch]) -> Sums:
        for number, (rows, labels) in enumerate(batches, start=1):
            with update.micro_batch(last=number == len(batches)) as micro_batch:
                scores = update.models(rows, trains_head=update.step % 4 == 3)
                loss = functional.cross_entropy(scores, labels, reduction="sum")
                micro_batch.backward(loss, len(labels))
        update.apply()
        return loss.detach(), len(labels), {}


class Table(Sound):
    """A confusion table, of which a number is made at the end."""

    def step(self, model: nn.Module, batch: Batch) -> Sums:
        loss, count, metrics = super().step(model, batch)
        return loss, count, metrics if model.training else {**metrics, "table": torch.bincount(batch[1], minlength=2)}

    def finish(self, sums: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"share": float(sums["table"][0] / sums["table"].sum())}


class Extra(Net):
    """Keeps a number that checkpoints have as extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, rows: Tensor) -> Tensor:
        scores = super().forward(rows)
        return scores * (1 + 1 / (1 + self.calls)) if self.training else scores

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class CountsExtra(CountsSteps):
    def train_step(self, update: OptimizerStep, batches: Sequence[Batch]) -> Sums:
        sums = OnlyTrains.train_step(self, update, batches)
        update.models.calls += 1
        return sums


class Means(Sound):
    """A loss over the pairs within a batch: a mean that is multiplied by its count."""

    def step(self, model: nn.Module, batch: Batch) -> Sums:
        rows, labels = batch
        loss = functional.cross_entropy(model(rows), labels) * len(labels)
        return loss, len(labels), {}
