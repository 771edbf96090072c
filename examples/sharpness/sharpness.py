"""A classifier by sharpness-aware minimization: the gradient of each step is that of a worse place nearby.

Source: Foret et al., "Sharpness-aware minimization for efficiently improving generalization", 2021.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from ddpexp.data.datasets import Arrays, Splits
from ddpexp.task import OptimizerStep, Sums

Rows = tuple[Tensor, Tensor]  # Shapes: (batch, 2), (batch,) labels


def load(train: int, test: int, wrong: float) -> Splits:
    return Splits(Arrays(draw(train, 0, wrong)), {"eval": Arrays(draw(test, 1, 0.0))})


def draw(count: int, seed: int, wrong: float) -> Rows:
    """Draw points of two spirals; a share of the labels is that of the other spiral."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    turn = torch.rand(count, generator=generator) * 1.5 + 0.25
    angle = 2 * math.pi * turn + math.pi * labels
    rows = torch.stack([angle.cos(), angle.sin()], 1) * turn[:, None]
    rows += torch.randn(count, 2, generator=generator) * 0.05
    is_wrong = torch.rand(count, generator=generator) < wrong
    return rows, torch.where(is_wrong, 1 - labels, labels)


class Net(nn.Sequential):
    def __init__(self, hidden: int) -> None:
        super().__init__(
            nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 2)
        )


class Climb(Optimizer):
    """Moves the parameters by `radius` to where the loss is larger."""

    def __init__(self, parameters: Iterable[Tensor], radius: float) -> None:
        super().__init__(parameters, {"lr": 1.0, "radius": radius})  # the radius does not follow the schedule

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        [group] = self.param_groups
        gradients = [p.grad for p in group["params"]]  # of the global batch
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for p, gradient in zip(group["params"], gradients, strict=True):
            p.add_(gradient * (group["radius"] / norm))


@dataclass(frozen=True)
class SharpnessAware:
    radius: float

    def optimizers(self, model: nn.Module, make: Callable[[Any], Optimizer]) -> Mapping[str, Optimizer]:
        return {"climb": Climb(model.parameters(), self.radius), "descend": make(model.parameters())}

    def train_step(self, update: OptimizerStep, batches: list[Rows]) -> Sums:
        parameters = list(update.models.parameters())
        before = [p.detach().clone() for p in parameters]
        sums = update.backward(batches)
        if update.apply("climb"):
            update.backward(batches)  # the gradient of the worse place
            with torch.no_grad():
                for p, value in zip(parameters, before, strict=True):
                    p.copy_(value)
            update.apply("descend")
        return sums

    def step(self, model: nn.Module, batch: Rows) -> Sums:
        rows, labels = batch
        scores = model(rows)
        loss = functional.cross_entropy(scores, labels, reduction="sum")
        return loss, len(rows), {"accuracy": ((scores.argmax(1) == labels).sum(), len(rows))}
