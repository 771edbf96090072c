"""Representations without labels: the queries are told from a queue of keys, which a slowly moving encoder makes.

Source: He et al., "Momentum contrast for unsupervised visual representation learning", 2020.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from ddpexp.data.datasets import Arrays, Splits
from ddpexp.task import OptimizerStep, Sums

SIZE = 16  # of a picture


def load(train: int, test: int) -> Splits:
    return Splits(Arrays([draw(train, 0)]), {"eval": Arrays([draw(test, 1)])})


def draw(count: int, seed: int) -> Tensor:
    """Draw pictures of 4 x 4 coarse blocks. Shapes: (count, 1, 16, 16)."""
    blocks = torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    return blocks.repeat_interleave(SIZE // 4, 2).repeat_interleave(SIZE // 4, 3)


class Encoders(nn.Module):
    """The encoder that is trained, the one that follows it, and the newest keys of the latter."""

    queue: Tensor

    def __init__(self, width: int, features: int, num_keys: int) -> None:
        super().__init__()
        self.query = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(width * (SIZE // 4) ** 2, features),
        )  # fmt: skip
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", normalize(torch.randn(num_keys, features), dim=1))

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(self.query(one), dim=1), normalize(self.key(other), dim=1)


@dataclass(frozen=True)
class MoCo:
    decay: float  # of the encoder of the keys
    temperature: float

    def train_step(self, update: OptimizerStep, batches: list[tuple[Tensor]]) -> Sums:
        model, keys = update.models, []
        total, found = torch.zeros(2, dtype=torch.float64, device=update.world.device)
        for number, [pictures] in enumerate(batches, start=1):
            with update.micro_batch(last=number == len(batches)) as micro_batch:
                queries, key = model(view(pictures), view(pictures))
                loss, right = self.contrast(queries, key, model.queue)
                micro_batch.backward(loss, len(key))
            keys.append(key)
            total, found = total + loss.detach(), found + right
        if update.apply():
            newest = update.world.gather(torch.cat(keys))  # of the global batch, in its order at any number of workers
            model.queue.copy_(torch.cat([model.queue, newest])[len(newest) :])
            follow(model.key, model.query, self.decay)
        count = sum(map(len, keys))
        return total, count, {"found": (found, count)}

    def contrast(self, queries: Tensor, keys: Tensor, queue: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses, and how many queries are nearest to their own key."""
        scores = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], 1) / self.temperature
        own = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
        return cross_entropy(scores, own, reduction="sum"), (scores.argmax(1) == own).sum()

    def step(self, model: Encoders, batch: tuple[Tensor]) -> Sums:  # in evaluation
        [pictures] = batch
        queries, keys = model(view(pictures), view(pictures))
        loss, found = self.contrast(queries, keys, model.queue)
        return loss, len(pictures), {"found": (found, len(pictures))}


@torch.no_grad()
def follow(slow: nn.Module, fast: nn.Module, decay: float) -> None:
    for one, other in zip(slow.parameters(), fast.parameters(), strict=True):
        one.lerp_(other, 1 - decay)


def view(pictures: Tensor) -> Tensor:
    """Move all pictures of a batch by up to two pixels, and add noise."""
    down, right = torch.randint(-2, 3, (2,)).tolist()
    return pictures.roll((down, right), (2, 3)) + 0.3 * torch.randn_like(pictures)
