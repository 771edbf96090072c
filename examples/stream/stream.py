from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ddpexp.data.datasets import Splits
from ddpexp.data.streams import Stream
from ddpexp.task import Sums


def sample(number: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(5, generator=torch.Generator().manual_seed(number))
    return inputs, inputs.sum(0, keepdim=True)


class Samples:  # one of `count` parts of an endless stream
    def __init__(self, index: int, count: int) -> None:
        self.number, self.count = index, count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            number, self.number = self.number, self.number + self.count
            yield sample(number)

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def load() -> Splits:
    inputs = torch.randn(100, 5)
    return Splits(train=Stream(Samples), evals={"eval": TensorDataset(inputs, inputs.sum(1, keepdim=True))})


class Net(nn.Sequential):
    def __init__(self, hidden: int) -> None:
        super().__init__(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, 1))


class Regress:
    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        inputs, targets = batch
        return functional.mse_loss(model(inputs), targets, reduction="sum"), len(inputs), {}
