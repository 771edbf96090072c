from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.data.datasets import Arrays, Splits
from ddpexp.task import Sums


def points(count: int, seed: int) -> Arrays:
    inputs = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))
    return Arrays((torch.arange(count), inputs, inputs.sum(1, keepdim=True)))


def load(samples: int) -> Splits:
    train = points(samples, seed=0)
    train.tensors[2][77] = 1000.0  # the mistake to find
    return Splits(train, {"eval": points(100, seed=1)})


class Net(nn.Sequential):
    def __init__(self, hidden: int) -> None:
        super().__init__(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, 1))


@dataclass(frozen=True)
class Regress:
    stop_above: float | None  # start the debugger where the mean loss of a micro-batch is higher

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Sums:
        numbers, inputs, targets = batch
        errors = functional.mse_loss(model(inputs), targets, reduction="none")
        loss = errors.sum()
        if self.stop_above is not None and loss.item() > self.stop_above * len(inputs):
            breakpoint()
        return loss, len(numbers), {}
