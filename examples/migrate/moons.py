"""The data and the model that all programs here train; moving to ddpexp changes neither."""

import math

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Moons(Dataset[tuple[Tensor, Tensor]]):
    """Points of two half circles that reach into each other. Shapes: a sample is (2,) and a label ()."""

    def __init__(self, samples: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(2, (samples,), generator=random)
        angles = math.pi * torch.rand(samples, generator=random)
        upper = torch.stack([angles.cos(), angles.sin()], 1)
        lower = torch.stack([1 - angles.cos(), 0.5 - angles.sin()], 1)
        noise = 0.2 * torch.randn(samples, 2, generator=random)
        self.points = torch.where(self.labels[:, None] == 0, upper, lower) + noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]


class Net(nn.Sequential):
    """Shapes: (batch, 2) -> (batch, 2)."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
