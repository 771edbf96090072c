from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ddpexp.data.datasets import Splits
from ddpexp.task import Sums


def load(samples: int) -> Splits:  # any map-style data set; ddpexp.data.datasets.Arrays is faster
    inputs = torch.randn(samples, 5)
    targets = inputs.sum(1, keepdim=True)
    return Splits(train=TensorDataset(inputs, targets), evals={"eval": TensorDataset(inputs[:100], targets[:100])})


class Net(nn.Sequential):
    def __init__(self, hidden: int) -> None:
        super().__init__(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, 1))


@dataclass(frozen=True)
class Regress:
    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:  # in training and in evaluation
        inputs, targets = batch
        loss = functional.mse_loss(model(inputs), targets, reduction="sum")
        return loss, len(inputs), {}  # sums and counts: the loop divides


@dataclass(frozen=True)
class Stable:  # warmup, plateau, decay: scheduler._target_=mine.Stable scheduler.decay=0.2
    decay: float

    def factor(self, step: int, num_steps: int) -> float:
        return min(1.0, (step + 1) / 100, (num_steps - step) / (self.decay * num_steps))
