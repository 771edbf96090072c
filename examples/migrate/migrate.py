"""What plain.py, with_accelerate.py, with_lightning.py and train.py do, as a recipe."""

from dataclasses import dataclass

from moons import Moons
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddpexp.data.datasets import Splits
from ddpexp.task import Sums


def load() -> Splits:
    return Splits(train=Moons(512, seed=0), evals={"eval": Moons(256, seed=1)})


@dataclass(frozen=True)
class Classify:
    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:  # in training and in evaluation
        points, labels = batch
        scores = model(points)
        loss = cross_entropy(scores, labels, reduction="sum")
        return loss, len(labels), {"accuracy": ((scores.argmax(1) == labels).sum(), len(labels))}
