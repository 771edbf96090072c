"""What the reference and the command both train: data, networks and tasks, as a user would write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from ddpexp.data.datasets import Arrays, Splits
from ddpexp.task import OptimizerStep, Sums

BROKEN = 17
"""The sample that is not a number where the data are configured to have one."""

_COLUMNS, _HIDDEN, _WORDS, _CLASSES = 6, 8, 10, 5
_NUMBERS = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "complex": torch.float32}

Batch = tuple[Tensor, Tensor, Tensor, Tensor]
"""ids (b,), rows (b, 6) in float64, words (b, 3), labels (b,)."""


def load(train: int, test: int, broken: bool) -> Splits:
    return Splits(_table(train, 1, BROKEN if broken else None), {"eval": _table(test, 2, None)})


def _table(count: int, seed: int, broken: int | None) -> Arrays:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, _COLUMNS, generator=generator, dtype=torch.float64)
    tokens = torch.randint(_WORDS, (count, 3), generator=generator)
    labels = (rows.sum(1) * 3 + tokens.sum(1)).long() % _CLASSES
    if broken is not None:
        rows[broken] = float("nan")
    return Arrays((torch.arange(count), rows, tokens, labels))


class Net(nn.Module):
    """A small network with one of each kind of part that a reduction may get wrong."""

    def __init__(self, seed: int, middle: str, weights: str, embedding: str, numbers: str) -> None:
        super().__init__()
        dtype = _NUMBERS[numbers]
        self.entry = nn.Linear(_COLUMNS, _HIDDEN, bias=False)
        self.embed = None if embedding == "none" else nn.Embedding(_WORDS, _HIDDEN, sparse=embedding == "sparse")
        kinds: dict[str, Callable[[], nn.Module]] = {
            "plain": nn.Identity,
            "batchnorm": lambda: nn.BatchNorm1d(_HIDDEN),
            "dropout": lambda: nn.Dropout(0.25),
        }
        self.middle = kinds[middle]()
        self.first = nn.Linear(_HIDDEN, _HIDDEN)
        self.second = nn.Linear(_HIDDEN, _HIDDEN)
        self.turn = nn.Parameter(torch.empty(_HIDDEN, _HIDDEN, dtype=torch.complex64)) if numbers == "complex" else None
        self.exit = nn.Linear(_HIDDEN, _CLASSES)
        if weights == "tied":
            self.second.weight = self.first.weight
        self.to(dtype) if numbers != "complex" else None
        # Drawn here, from a generator of its own: the reference must not depend on how the command seeds a model.
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if not name.startswith("middle."):
                    parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=_wide(parameter)) * 0.4)
        if weights == "frozen":
            self.entry.weight.requires_grad_(False)

    def forward(self, rows: Tensor, overrides: Tensor) -> Tensor:
        hidden = self.entry(rows.to(self.entry.weight.dtype))
        if self.embed is not None:
            hidden = hidden + self.embed(overrides).mean(1)
        hidden = torch.tanh(self.middle(hidden))
        hidden = self.second(torch.tanh(self.first(hidden)))
        if self.turn is not None:
            turned = torch.complex(hidden.float(), hidden.float().square()) @ self.turn
            hidden = turned.real - turned.imag
        scores: Tensor = self.exit(hidden)
        return scores


def _wide(parameter: Tensor) -> torch.dtype:
    return torch.complex128 if parameter.is_complex() else torch.float64


def build(middle: str, weights: str, embedding: str, numbers: str, two: bool) -> Any:
    if two:
        return {name: Net(seed, middle, weights, embedding, numbers) for seed, name in enumerate(("left", "right"))}
    return Net(0, middle, weights, embedding, numbers)


def kept(ids: Tensor) -> Tensor:
    """Return which samples are not padding: another share of each micro-batch. Shapes: as `ids`, bool."""
    return (ids % 5 != 0) & (ids % 7 > 1)


def entropy(scores: Tensor, batch: Batch, counts: str) -> tuple[Tensor, int | Tensor]:
    """Return a loss's sum and its count: of all samples as a number, or of those that are no padding as a tensor."""
    ids, _, _, labels = batch
    losses = functional.cross_entropy(_fp32(scores), labels, reduction="none")
    if counts == "int":
        return losses.sum(), len(ids)
    return (losses * kept(ids)).sum(), kept(ids).sum()


def size(scores: Tensor, batch: Batch, counts: str) -> tuple[Tensor, int | Tensor]:
    """Return the sum of the squared scores, and the count that `entropy` has."""
    ids = batch[0]
    sizes = _fp32(scores).square().mean(1)
    if counts == "int":
        return sizes.sum(), len(ids)
    return (sizes * kept(ids)).sum(), kept(ids).sum()


def half(scores: Tensor) -> tuple[Tensor, int]:
    """Return how many scores were computed in 16 bits, and of how many.

    Rounding alone tells autocast from none badly.
    """
    return torch.tensor(float(scores.element_size() == 2) * len(scores)), len(scores)


def _fp32(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


@dataclass(frozen=True)
class Plain:
    """One forward pass for the loss and the metrics."""

    counts: str

    def step(self, model: Any, batch: Batch) -> Sums:
        scores = model(batch[1], batch[2])
        metrics = {"size": size(scores.detach(), batch, self.counts), "half": half(scores)}
        return *entropy(scores, batch, self.counts), metrics


def added(sums: list[Sums]) -> Sums:
    """Add up what a worker's micro-batches give, for the records."""
    metrics = {
        name: (torch.stack([part[2][name][0] for part in sums]).sum(), sum(part[2][name][1] for part in sums))
        for name in sums[0][2]
    }
    return torch.stack([part[0].detach() for part in sums]).sum(), sum(part[1] for part in sums), metrics


@dataclass(frozen=True)
class Groups:
    """Two optimizers, one of them with groups that have rates of their own."""

    counts: str

    def optimizers(self, model: Net, make: Callable[[Iterable[Any]], Optimizer]) -> Mapping[str, Optimizer]:
        return groups(model, make)

    def step(self, model: Any, batch: Batch) -> Sums:
        return Plain(self.counts).step(model, batch)


def groups(model: Net, make: Callable[[Iterable[Any]], Optimizer]) -> dict[str, Optimizer]:
    """Divide the parameters: the last layer, and the others, of which the weights learn more slowly."""
    last = list(model.exit.parameters())
    others = [parameter for name, parameter in model.named_parameters() if not name.startswith("exit.")]
    return {
        "last": make(last),
        "others": make(
            [
                {"params": [parameter for parameter in others if parameter.ndim > 1], "lr": 0.03},
                {"params": [parameter for parameter in others if parameter.ndim == 1]},
            ]
        ),
    }


@dataclass(frozen=True)
class Twice:
    """A manually optimized step with two losses, each with its own forward and backward pass in every micro-batch."""

    counts: str

    def train_step(self, update: OptimizerStep, batches: list[Batch]) -> Sums:
        sums = []
        for number, batch in enumerate(batches):
            with update.micro_batch(last=number == len(batches) - 1) as micro_batch:
                sums.append(self.step(update.models, batch))
                micro_batch.backward(*sums[-1][:2])
                micro_batch.backward(*size(update.models(batch[1], batch[2]), batch, self.counts))
        update.apply()
        return added(sums)

    def step(self, model: Any, batch: Batch) -> Sums:
        return Plain(self.counts).step(model, batch)


@dataclass(frozen=True)
class Pair:
    """Two networks that learn the same in one pass, and two optimizers that are applied one after the other."""

    counts: str

    def optimizers(
        self, model: Mapping[str, Net], make: Callable[[Iterable[Any]], Optimizer]
    ) -> Mapping[str, Optimizer]:
        return {name: make(net.parameters()) for name, net in model.items()}

    def train_step(self, update: OptimizerStep, batches: list[Batch]) -> Sums:
        sums = []
        for number, batch in enumerate(batches):
            with update.micro_batch(last=number == len(batches) - 1) as micro_batch:
                for name in ("left", "right"):
                    learned = Plain(self.counts).step(update.models[name], batch)
                    micro_batch.backward(*learned[:2])
                    sums += [learned] if name == "left" else []
        update.apply("left")
        update.apply("right")
        return added(sums)

    def step(self, model: Mapping[str, Any], batch: Batch) -> Sums:
        return Plain(self.counts).step(model["left"], batch)


@dataclass(frozen=True)
class Game:
    """Two networks against each other, in two passes over the micro-batches; the second leaves gradients in both."""

    counts: str

    def optimizers(
        self, model: Mapping[str, Net], make: Callable[[Iterable[Any]], Optimizer]
    ) -> Mapping[str, Optimizer]:
        return {name: make(net.parameters()) for name, net in model.items()}

    def train_step(self, update: OptimizerStep, batches: list[Batch]) -> Sums:
        left, right = update.models["left"], update.models["right"]
        sums = []
        for number, batch in enumerate(batches):
            with update.micro_batch(last=number == len(batches) - 1) as micro_batch:
                sums.append(Plain(self.counts).step(left, batch))
                micro_batch.backward(*sums[-1][:2])
        update.apply("left")
        for number, batch in enumerate(batches):
            with update.micro_batch(last=number == len(batches) - 1) as micro_batch:
                scores = right(batch[1], batch[2]) - left(batch[1], batch[2])
                micro_batch.backward(*entropy(scores, batch, self.counts))
        update.apply("right")
        return added(sums)

    def step(self, model: Mapping[str, Any], batch: Batch) -> Sums:
        return Plain(self.counts).step(model["left"], batch)
