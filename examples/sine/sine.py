"""A curve through points of a sine, found by L-BFGS, a method of second order for smooth losses.

Source: Liu and Nocedal, "On the limited memory BFGS method for large scale optimization", 1989.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.data.datasets import Arrays, Splits
from ddpexp.task import Sums

Points = tuple[Tensor, Tensor]  # Shapes: (batch, 1) places, (batch, 1) heights


def load(train: int, test: int) -> Splits:
    return Splits(Arrays(draw(train, 0)), {"eval": Arrays(draw(test, 1))})


def draw(count: int, seed: int) -> Points:
    generator = torch.Generator().manual_seed(seed)
    places = (torch.rand(count, 1, generator=generator) * 2 - 1) * math.pi
    return places, places.sin()


class Curve(nn.Sequential):
    def __init__(self, hidden: int) -> None:
        super().__init__(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))


class Fit:
    def step(self, model: nn.Module, batch: Points) -> Sums:
        places, heights = batch
        loss = functional.mse_loss(model(places), heights, reduction="sum")
        return loss, len(places), {}
