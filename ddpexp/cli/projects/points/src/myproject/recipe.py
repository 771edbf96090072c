"""Which points lie inside a circle: the data, the model and the task of the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.data.datasets import Arrays, Splits
from ddpexp.task import Sums


def load(num_train: int, num_eval: int) -> Splits:
    """Return the data: any map-style torch Dataset will do; `Arrays` gathers a batch at once, which is faster."""
    return Splits(train=_points(num_train, seed=0), evals={"eval": _points(num_eval, seed=1)})


def _points(count: int, seed: int) -> Arrays:
    points = 2 * torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) - 1
    return Arrays((points, (points.norm(dim=1) < 0.8).long()))


class Net(nn.Sequential):
    """A network with one hidden layer. Shapes: (batch, 2) -> (batch, 2)."""

    def __init__(self, hidden: int) -> None:
        """Build it with `hidden` units."""
        super().__init__(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, 2))


@dataclass(frozen=True)
class Classify:
    """Cross entropy and accuracy."""

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        """Return sums over the batch, in training and in evaluation: ddpexp divides by the counts of all workers."""
        points, labels = batch
        scores = model(points)
        loss = functional.cross_entropy(scores, labels, reduction="sum")
        return loss, len(labels), {"accuracy": ((scores.argmax(1) == labels).sum(), len(labels))}

    def predict(self, model: nn.Module, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return a row for each sample, for `ddpexp predict`: its class, and the probability of each class."""
        probability = model(batch[0]).softmax(1)
        return {"label": probability.argmax(1), "probability": probability}
