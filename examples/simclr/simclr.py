"""Representations without labels: two views of a picture are alike, and unlike all other views of the global batch.

Source: Chen et al., "A simple framework for contrastive learning of visual representations", 2020.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.data.datasets import Arrays, Splits
from ddpexp.task import Sums

SIZE, KINDS = 16, 6  # of a picture; directions of the stripes
Pictures = tuple[Tensor, Tensor]  # Shapes: (batch, 1, 16, 16), (batch,) kinds, which training does not use


def load(train: int, test: int) -> Splits:
    return Splits(Arrays(draw(train, 0)), {"eval": Arrays(draw(test, 1))})


def draw(count: int, seed: int) -> Pictures:
    """Draw stripes in noise: their kind is their direction; their width and place are random."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(KINDS, (count,), generator=generator)
    angle = (kinds * math.pi / KINDS)[:, None, None]
    waves, phase = 1 + 2 * torch.rand(2, count, 1, 1, generator=generator)
    at = torch.linspace(-math.pi, math.pi, SIZE)
    across = angle.cos() * at + angle.sin() * at[:, None]
    noise = torch.randn(count, SIZE, SIZE, generator=generator) * 0.7
    return ((across * waves + math.pi * phase).sin() + noise)[:, None], kinds


class Encoder(nn.Module):
    """The features of pictures, and what the loss compares: their projections on a sphere."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(width * (SIZE // 4) ** 2, 2 * width), nn.ReLU(), nn.Dropout(0.1),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, features))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(pictures)
        return features, functional.normalize(self.head(features), dim=1)


@dataclass(frozen=True)
class SimCLR:
    temperature: float

    def embed(self, model: nn.Module, batch: Pictures) -> tuple[Tensor, ...]:
        pictures, kinds = batch
        features, first = model(view(pictures))
        _, second = model(view(pictures))
        return first, second, features.detach(), kinds

    def loss(self, model: nn.Module, embeddings: tuple[Tensor, ...]) -> Sums:
        first, second, features, kinds = embeddings  # of the whole global batch
        views = torch.cat([first, second])
        scores = (views @ views.T / self.temperature).fill_diagonal_(-math.inf)
        others = torch.arange(len(views), device=views.device).roll(len(first))
        loss = functional.cross_entropy(scores, others, reduction="sum")
        found = (scores.argmax(1) == others).sum(), len(views)
        nearest = torch.cdist(features, features).fill_diagonal_(math.inf).argmin(1)
        return loss, len(views), {"found": found, "same_kind": ((kinds[nearest] == kinds).sum(), len(kinds))}


def view(pictures: Tensor) -> Tensor:
    """Crop each picture at random, change its contrast and add noise."""
    drawn = torch.rand(4, len(pictures), device=pictures.device, dtype=pictures.dtype)
    size, down, right, contrast = drawn.unbind()
    size = 0.5 + size / 2
    place = torch.stack([right, down], 1) * 2 - 1
    corners = torch.cat([torch.diag_embed(size[:, None].expand(-1, 2)), (place * (1 - size)[:, None])[..., None]], 2)
    grid = functional.affine_grid(corners, list(pictures.shape), align_corners=False)
    crops = functional.grid_sample(pictures, grid, align_corners=False)
    return crops * (0.5 + contrast[:, None, None, None]) + torch.randn_like(crops) * 0.1
