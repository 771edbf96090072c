import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.data.datasets import Arrays, Splits
from ddpexp.task import Sums


def load(samples: int, noise: float) -> Splits:
    inputs = torch.randn(samples, 5)
    targets = inputs.sum(1, keepdim=True) + noise * torch.randn(samples, 1)
    return Splits(train=Arrays((inputs, targets)), evals={"eval": Arrays((inputs[:100], targets[:100]))})


class Net(nn.Sequential):
    def __init__(self, hidden: int) -> None:
        super().__init__(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, 1))


class Regress:
    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        inputs, targets = batch
        return functional.mse_loss(model(inputs), targets, reduction="sum"), len(inputs), {}
