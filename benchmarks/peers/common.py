"""What the peers share: the decoded data, the models, the report."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional


def load(root: str, part: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read images and labels of `train` or `t10k` from the gzipped IDX files."""
    found = []
    for name, header in ((f"{part}-images-idx3-ubyte.gz", 16), (f"{part}-labels-idx1-ubyte.gz", 8)):
        data = gzip.decompress((Path(root) / name).read_bytes())
        found.append(np.frombuffer(data, np.uint8, offset=header))
    images, labels = found
    return images.reshape(-1, 28, 28), labels


def model(name: str, seed: int = 0) -> nn.Module:
    """Build a model with the layers and weights of ddpexp's: `linear`, `lenet`, `resnet18`, `resnet50` or perceptrons.

    The last are `shallow`, with one hidden layer of 128, and `deep`, with four of 64: 10 tensors, 63,370 parameters.
    """
    torch.manual_seed(seed)
    if name == "resnet18":
        return resnet18()
    if name == "resnet50":
        from recipes.imagenet import ResNet

        return ResNet(1000, (3, 4, 6, 3), bottleneck=True)
    if name == "lenet":
        return nn.Sequential(
            nn.Conv2d(1, 16, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(16, 32, 5), nn.MaxPool2d(2), nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip
    hidden = {"linear": [], "shallow": [128], "deep": [64] * 4}[name]
    layers: list[nn.Module] = [nn.Flatten()]
    for width, following in zip([784, *hidden], hidden, strict=False):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear([784, *hidden][-1], 10))


def resnet18() -> nn.Module:
    """Build ResNet-18 for images of 32 x 32: the first layer 3 x 3, and no pooling behind it.

    Source: He et al., "Deep Residual Learning for Image Recognition" (2016), with the first layer of its CIFAR-10
    networks.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    before = 64
    for width in (64, 128, 256, 512):
        layers += [Block(before, width, stride=1 if width == before else 2), Block(width, width, stride=1)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Block(nn.Module):
    """Two convolutions, and the way around them. Shapes.

    (batch, before, h, w) to (batch, width, h / stride, w / stride).
    """

    def __init__(self, before: int, width: int, stride: int) -> None:
        """Build both ways."""
        super().__init__()
        self.through = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.around: nn.Module = nn.Identity()
        if stride > 1 or before != width:
            self.around = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, images: Tensor) -> Tensor:
        """Add what both ways give."""
        return functional.relu(self.through(images) + self.around(images))


class Report:
    """When the first step was done and how many followed a second, after a warm-up.

    In all, and in the fastest stretch.
    """

    warmup = stretch = 50

    def __init__(self) -> None:
        """Start with no step done."""
        self.steps = 0
        self.first = self.warm = self.last = 0.0
        self.begin = self.fastest = 0.0  # of a stretch; the most steps a second of one

    def step(self) -> None:
        """Count a step."""
        self.steps += 1
        self.last = time.time()
        if self.steps == 1:
            self.first = self.last
        if self.steps == self.warmup:
            self.warm = self.last
        if self.steps % self.stretch == 0:
            if self.steps > self.warmup:
                self.fastest = max(self.fastest, self.stretch / (self.last - self.begin))
            self.begin = self.last

    def show(self) -> None:
        """Print the figures as one line of JSON."""
        rate = (self.steps - self.warmup) / (self.last - self.warm) if self.steps > self.warmup else None
        found = {"first_step_at": self.first, "steps_per_second": rate, "fastest_steps_per_second": self.fastest}
        print(json.dumps(found), flush=True)
