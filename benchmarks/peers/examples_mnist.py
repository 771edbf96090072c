"""What newcomers run today: the network and the recipe of pytorch/examples' MNIST program, one process with all cores.

Two convolutions, dropout, Adadelta from lr 1 falling by 0.7 an epoch, batch 64, one sample at a time through a
DataLoader; stops after the first epoch that reaches the accuracy asked for.
"""

from __future__ import annotations

import argparse
import json

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from benchmarks.peers.common import load


class Digits(Dataset[tuple[Tensor, int]]):
    """One sample at a time, converted and normalised on the way, as the tutorials' transforms do it."""

    def __init__(self, root: str, part: str) -> None:
        """Read the files."""
        self.images, self.labels = load(root, part)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Convert one image."""
        image = torch.from_numpy(self.images[index].copy()).unsqueeze(0).float().div(255)
        return image.sub_(0.1307).div_(0.3081), int(self.labels[index])


def main() -> None:
    """Train until the accuracy is reached, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--accuracy", type=float, default=0.99)
    words = parser.parse_args()
    torch.manual_seed(1)
    network = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip
    train = DataLoader(Digits(words.data, "train"), 64, shuffle=True)
    test = DataLoader(Digits(words.data, "t10k"), 1000)
    optimizer = torch.optim.Adadelta(network.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    for epoch in range(14):
        network.train()
        for images, labels in train:
            optimizer.zero_grad()
            functional.cross_entropy(network(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        schedule.step()
        network.eval()
        with torch.no_grad():
            accuracy = sum(int((network(images).argmax(1) == labels).sum()) for images, labels in test) / 10_000
        print(json.dumps({"epoch": epoch + 1, "accuracy": accuracy}), flush=True)
        if accuracy >= words.accuracy:
            break


if __name__ == "__main__":
    main()
