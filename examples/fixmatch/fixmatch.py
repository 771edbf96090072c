"""A classifier of pictures of which few have labels: a slowly moving teacher guesses the labels of the others.

Source: Sohn et al., "FixMatch: simplifying semi-supervised learning with consistency and confidence", 2020; Tarvainen
and Valpola, "Mean teachers are better role models", 2017.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddpexp.data.datasets import Arrays, Splits
from ddpexp.task import Loss, NamedSums, OptimizerStep, Sums

SIZE, CLASSES, UNKNOWN = 16, 4, -1

Pictures = tuple[Tensor, Tensor]  # Shapes: (batch, 1, 16, 16), (batch,)


def labelled(train: int, test: int) -> Splits:
    return Splits(Arrays(draw(train, 0)), {"eval": Arrays(draw(test, 1))})


def unlabelled(train: int) -> Splits:
    pictures, labels = draw(train, 2)
    return Splits(Arrays((pictures, torch.full_like(labels, UNKNOWN))), {})


def draw(count: int, seed: int) -> Pictures:
    """Draw stripes in noise, in one of four directions."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    phase, period = torch.rand(2, count, 1, 1, generator=generator).mul(torch.tensor([6.3, 4.0])[:, None, None, None])
    angle = labels[:, None, None] * (torch.pi / CLASSES)
    at = torch.arange(float(SIZE))
    wave = (at * angle.cos() + at[:, None] * angle.sin()) * 2 * torch.pi / (4 + period) + phase
    return (wave.sin() + torch.randn(count, SIZE, SIZE, generator=generator))[:, None], labels


def networks(width: int) -> dict[str, nn.Module]:
    student = nn.Sequential(
        nn.Conv2d(1, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(width * (SIZE // 4) ** 2, CLASSES),
    )  # fmt: skip
    return {"student": student, "teacher": copy.deepcopy(student).requires_grad_(False)}


@dataclass(frozen=True)
class FixMatch:
    threshold: float  # of the teacher's probability
    weight: float  # of the loss of the pictures without labels
    decay: float  # of the teacher

    def train_step(self, update: OptimizerStep, batches: list[Pictures]) -> Sums:
        sums = update.backward(batches)  # of the two losses of `step`
        if update.apply():
            follow(update.models["teacher"], update.models["student"], self.decay)
        return sums

    def step(self, model: Mapping[str, nn.Module], batch: Pictures) -> NamedSums | Sums:
        pictures, labels = batch
        if not model["student"].training:
            return self.evaluated(model["teacher"](pictures), labels)
        has_label, weakly = labels != UNKNOWN, weak(pictures)
        with torch.no_grad():
            probability, guess = model["teacher"](weakly).float().softmax(1).max(1)
        views = torch.where(has_label[:, None, None, None], weakly, strong(pictures))
        scores = model["student"](views)
        losses = cross_entropy(scores, torch.where(has_label, labels, guess), reduction="none")
        is_sure = ~has_label & (probability >= self.threshold)
        num_labelled, num_others = has_label.sum(), (~has_label).sum()
        named: dict[str, Loss] = {
            "labelled": (losses[has_label].sum(), num_labelled),
            "unlabelled": (losses[is_sure].sum(), num_others, self.weight),
        }
        return named, {"sure": (is_sure.sum(), num_others)}

    def evaluated(self, scores: Tensor, labels: Tensor) -> Sums:
        accuracy = ((scores.argmax(1) == labels).sum(), len(labels))
        return cross_entropy(scores, labels, reduction="sum"), len(labels), {"accuracy": accuracy}

    def counts(self, batch: Pictures) -> dict[str, Tensor]:
        has_label = batch[1] != UNKNOWN
        return {"labelled": has_label.sum(), "unlabelled": (~has_label).sum()}


@torch.no_grad()
def follow(slow: nn.Module, fast: nn.Module, decay: float) -> None:
    for one, other in zip(slow.parameters(), fast.parameters(), strict=True):
        one.lerp_(other, 1 - decay)


def weak(pictures: Tensor) -> Tensor:
    """Move all pictures of a batch by up to two pixels."""
    down, right = torch.randint(-2, 3, (2,)).tolist()
    return pictures.roll((down, right), (2, 3))


def strong(pictures: Tensor) -> Tensor:
    """Move them, hide half of the pixels and add noise to the others."""
    return weak(pictures + torch.randn_like(pictures)) * (torch.rand_like(pictures) < 0.5)
