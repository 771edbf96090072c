"""What the peers share: the decoded data, the models, the report."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn


def load(root: str, part: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read images and labels of `train` or `t10k` from the gzipped IDX files."""
    found = []
    for name, header in ((f"{part}-images-idx3-ubyte.gz", 16), (f"{part}-labels-idx1-ubyte.gz", 8)):
        data = gzip.decompress((Path(root) / name).read_bytes())
        found.append(np.frombuffer(data, np.uint8, offset=header))
    images, labels = found
    return images.reshape(-1, 28, 28), labels


def model(name: str, seed: int = 0) -> nn.Module:
    """Build a model, with the same layers and weights as ddpexp: `linear`, `lenet`, or perceptrons.

    Those are `shallow`, with one hidden layer of 128, and `deep`, with four of 64: 10 tensors, 63,370 parameters.
    """
    torch.manual_seed(seed)
    if name == "lenet":
        return nn.Sequential(
            nn.Conv2d(1, 16, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(16, 32, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(),
            nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip
    hidden = {"linear": [], "shallow": [128], "deep": [64] * 4}[name]
    layers: list[nn.Module] = [nn.Flatten()]
    for width, following in zip([784, *hidden], hidden, strict=False):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear([784, *hidden][-1], 10))


class Report:
    """When the first step was done and how many followed a second, after a warm-up."""

    warmup = 50

    def __init__(self) -> None:
        """Start with no step done."""
        self.steps = 0
        self.first = self.warm = self.last = 0.0

    def step(self) -> None:
        """Count a step."""
        self.steps += 1
        self.last = time.time()
        if self.steps == 1:
            self.first = self.last
        if self.steps == self.warmup:
            self.warm = self.last

    def show(self) -> None:
        """Print the figures as one line of JSON."""
        rate = (self.steps - self.warmup) / (self.last - self.warm) if self.steps > self.warmup else None
        print(json.dumps({"first_step_at": self.first, "steps_per_second": rate}), flush=True)
