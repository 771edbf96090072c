import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from ddpexp.data.datasets import Splits
from ddpexp.task import Sums

Sample = tuple[Tensor, int]


class Bars(Dataset[Sample]):  # images with a horizontal or, more seldom, a vertical bar
    def __init__(self, count: int) -> None:
        self.labels = [int(index % 10 == 0) for index in range(count)]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        image = torch.zeros(1, 8, 8)
        image[0, index % 8] = 1.0
        return image.mT if self.labels[index] else image, self.labels[index]


def shift(image: Tensor, most: int) -> Tensor:
    return image.roll((random.randint(0, most), random.randint(0, most)), (1, 2))


def collate(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)


def load() -> Splits:
    return Splits(train=Bars(640), evals={"eval": Bars(80)})


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))


class Classify:
    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        images, labels = batch
        logits = model(images)
        correct = (logits.argmax(1) == labels).sum()
        return cross_entropy(logits, labels, reduction="sum"), len(labels), {"accuracy": (correct, len(labels))}

    def predict(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"label": model(batch[0]).argmax(1)}

    def read_input(self, value: str) -> Sample:  # a file of 64 numbers, as a sample of the set; nobody knows its label
        return torch.from_numpy(np.loadtxt(value, np.float32)).view(1, 8, 8), -1
