import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.data.datasets import Arrays, Splits
from ddpexp.task import Sums


def points(count: int, seed: int) -> Arrays:
    rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return Arrays((rows, (rows.sum(1) > 0).long()))


def load(count: int) -> Splits:
    return Splits(train=points(count, 0), evals={"eval": points(100, 1)})


class Net(nn.Sequential):
    def __init__(self, hidden: int) -> None:
        super().__init__(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2))


class Sides:
    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        rows, labels = batch
        scores = model(rows)
        loss = functional.cross_entropy(scores, labels, reduction="sum")
        return loss, len(labels), {"accuracy": ((scores.argmax(1) == labels).sum(), len(labels))}
