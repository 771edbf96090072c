"""Representations of pictures without labels, as SimCLR learns them: the data, the model and the task of the recipe.

A sample is a picture in two views. A view is to be found by its picture's other view, among all views of the global
batch, whatever the number of workers and micro-batches.

Source: Chen et al., "A simple framework for contrastive learning of visual representations", 2020.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.data.base import IndexData
from ddpexp.data.datasets import Splits
from ddpexp.data.open_image import open_image
from ddpexp.errors import RefusedError
from ddpexp.task import Sums

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the colors in ImageNet, as data=image_folder has them
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


def load(root: str | None, size: int) -> Splits:
    """Return the data: all pictures in the folder `root` and below it; every tenth is held out."""
    if root is None or not Path(root).is_dir():
        raise RefusedError(
            "is not a folder", key="data.root", value=root, suggestion="Name one with pictures: data.root=PICTURES."
        )
    files = sorted(path for path in Path(root).rglob("*") if path.suffix.lower() in SUFFIXES)
    if len(files) < 2:
        raise RefusedError("holds no pictures", key="data.root", value=root, suggestion=f"Add some, as {SUFFIXES[0]}.")
    train = [path for number, path in enumerate(files) if number % 10]
    return Splits(train=Views(train, size), evals={"eval": Views(files[::10], size)})


@dataclass(frozen=True)
class Views(IndexData):
    """Pictures in two views each, all drawn from `draw`: the same at every number of workers."""

    files: Sequence[Path]
    size: int  # of a view, in pixels
    draw: str = "eval"

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.files)

    def of_epoch(self, seed: int, epoch: int) -> Views:
        """Return the same pictures in other views."""
        return replace(self, draw=f"{seed} {epoch}")

    def __getitem__(self, index: int) -> Tensor:
        """Return both views of a picture. Shapes: (2, 3, size, size), uint8."""
        dice = random.Random(f"{self.draw} {index}")
        with open_image(self.files[index]) as picture:
            whole = ImageOps.exif_transpose(picture).convert("RGB")
        views = [np.array(view(whole, self.size, dice)) for _ in range(2)]
        return torch.from_numpy(np.stack(views)).permute(0, 3, 1, 2)


def view(picture: Image.Image, size: int, dice: random.Random) -> Image.Image:
    """Return a part of a picture, perhaps mirrored, in other colors or in grey."""
    share = dice.uniform(0.2, 1) ** 0.5
    width, height = picture.width * share, picture.height * share
    left, top = dice.uniform(0, picture.width - width), dice.uniform(0, picture.height - height)
    part = picture.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + width, top + height))
    if dice.random() < 0.5:
        part = ImageOps.mirror(part)
    for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        part = change(part).enhance(dice.uniform(0.6, 1.4))
    return ImageOps.grayscale(part).convert("RGB") if dice.random() < 0.2 else part


class Net(nn.Module):
    """Convolutions (`backbone`), whose features are what is learned, and a network (`project`) for the loss alone.

    Shapes: (..., 3, any, any), uint8 -> (..., 64), of length 1.
    """

    def __init__(self, width: int, depth: int) -> None:
        """Build it with `width` channels, a multiple of 8, in the first of `depth` stages."""
        super().__init__()
        widths = [width * 2**stage for stage in range(depth)]
        stages = [_stage(before, after) for before, after in zip([3, *widths[:-1]], widths, strict=True)]
        self.backbone = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.project = nn.Sequential(nn.Linear(widths[-1], widths[-1]), nn.ReLU(), nn.Linear(widths[-1], 64))

    def features(self, pictures: Tensor) -> Tensor:
        """Return what is used afterwards. Shapes: (batch, 3, any, any), uint8 -> (batch, channels)."""
        mean, std = (torch.tensor(color, device=pictures.device)[:, None, None] for color in (MEAN, STD))
        return self.backbone((pictures / 255 - mean) / std)  # type: ignore[no-any-return]

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the projections."""
        projections = self.project(self.features(pictures.flatten(0, -4)))
        return functional.normalize(projections, dim=1).reshape(*pictures.shape[:-3], -1)


def _stage(before: int, after: int) -> nn.Sequential:
    # GroupNorm looks at one picture at a time: BatchNorm would tell the views of a batch from one another.
    return nn.Sequential(nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(8, after), nn.ReLU())


@dataclass(frozen=True)
class Contrast:
    """Which view of the global batch is the other view of the same picture: cross entropy and accuracy."""

    temperature: float

    def embed(self, model: nn.Module, views: Tensor) -> Tensor:
        """Return the projections of both views. Shapes: (batch, 2, 3, size, size) -> (batch, 2, 64)."""
        return model(views).float()  # type: ignore[no-any-return]

    def loss(self, model: nn.Module, projections: Tensor) -> Sums:
        """Return sums over all views of the global batch. Shapes: (global batch, 2, 64)."""
        views = projections.flatten(0, 1)  # the other view of view i is i + 1 if i is even, and i - 1 if it is odd
        partners = torch.arange(len(views), device=views.device) ^ 1
        scores = (views @ views.T / self.temperature).fill_diagonal_(-torch.inf)
        loss = functional.cross_entropy(scores, partners, reduction="sum")
        return loss, len(partners), {"accuracy": ((scores.argmax(1) == partners).sum(), len(partners))}
