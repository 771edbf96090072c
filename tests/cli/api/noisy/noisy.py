"""A recipe whose model draws its weights from every global generator, and whose task can fail."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ddpexp.data.datasets import Splits


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 1)
        with torch.no_grad():
            self.weight[0, 0] = float(np.random.rand())
            self.weight[0, 1] = random.random()


def load(samples: int) -> Splits:
    inputs = torch.randn(samples, 5)
    np.random.rand(samples)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return Splits(train=data, evals={"eval": data})


@dataclass(frozen=True)
class Regress:
    fails: bool = False

    def step(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Any]]:
        inputs, targets = batch
        if self.fails:
            raise ValueError("boom")
        return functional.mse_loss(model(inputs), targets, reduction="sum"), len(inputs), {}
