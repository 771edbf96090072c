"""Representations without labels: a network predicts what a slowly moving copy of it makes of another view.

Source: Grill et al., "Bootstrap your own latent", 2020.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.task import OptimizerStep, Sums

Images = tuple[Tensor, Tensor]  # of data=mnist; the labels are not used


def encoder(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 4, stride=2),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 4, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * 25, 64),
    )


def networks(width: int) -> dict[str, nn.Module]:
    online = encoder(width)
    predictor = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64))
    target = copy.deepcopy(online).requires_grad_(False)
    return {"online": online, "predictor": predictor, "target": target}


@dataclass(frozen=True)
class BYOL:
    decay: float  # of the target, in the first step; it grows to 1

    def train_step(self, update: OptimizerStep, batches: list[Images]) -> Sums:
        sums = update.backward(batches)  # through `step`
        if update.apply():
            progress = update.step / update.num_steps
            decay = 1 - (1 - self.decay) * (math.cos(math.pi * progress) + 1) / 2
            follow(update.models["target"], update.models["online"], decay)
        return sums

    def step(self, model: Mapping[str, nn.Module], batch: Images) -> Sums:
        images, _ = batch
        one, other = shifted(images), shifted(images)
        loss = self.distance(model, one, other) + self.distance(model, other, one)
        return loss.sum(), len(images), {}

    def distance(self, model: Mapping[str, nn.Module], view: Tensor, other: Tensor) -> Tensor:
        prediction = model["predictor"](model["online"](view)).float()
        with torch.no_grad():
            target = model["target"](other).float()
        return 2 - 2 * functional.cosine_similarity(prediction, target)


@torch.no_grad()
def follow(target: nn.Module, online: nn.Module, decay: float) -> None:
    for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
        slow.lerp_(fast, 1 - decay)


def shifted(images: Tensor) -> Tensor:
    """Move all images of a batch by up to three pixels."""
    down, right = torch.randint(-3, 4, (2,)).tolist()
    return images.roll((down, right), (2, 3))
