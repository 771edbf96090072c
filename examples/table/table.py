"""Predict a column of a table, a class or a number, with a small network."""

from __future__ import annotations

import csv
import random
import sys
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional


class Net(nn.Sequential):
    """Two hidden layers. Shapes: (batch, num_features) -> (batch, num_classes)."""

    def __init__(self, num_features: int, num_classes: int, width: int = 32) -> None:
        layers = [nn.Linear(num_features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        super().__init__(*layers, nn.Linear(width, num_classes))


@dataclass(frozen=True)
class Classify:
    """Cross entropy and accuracy."""

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int, dict[str, tuple[Tensor, int]]]:
        inputs, labels = batch
        scores = model(inputs)
        loss = functional.cross_entropy(scores, labels, reduction="sum")
        return loss, len(labels), {"accuracy": ((scores.argmax(1) == labels).sum(), len(labels))}

    def predict(self, model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        probability = model(batch[0]).softmax(1)
        return {"label": probability.argmax(1), "probability": probability}


def write(path: str, rows: int = 240, seed: int = 0) -> None:
    """Write a table of flowers, invented here: three species that differ in the sizes of their petals."""
    numbers = random.Random(seed)
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["garden", "length", "width", "species"])
        for row in range(rows):
            species = row % 3
            length, width = numbers.gauss(20 + 10 * species, 3), numbers.gauss(10 - 2 * species, 1)
            table.writerow([f"garden {row % 8}", f"{length:.2f}", f"{width:.2f}", ("daisy", "iris", "lily")[species]])


if __name__ == "__main__":
    write(sys.argv[1])
