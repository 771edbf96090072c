"""Classify the photographs of a folder with a small residual network."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Two convolutions beside a shortcut, at half the resolution.

    Shapes: (batch, channels_in, height, width) -> (batch, channels_out, height / 2, width / 2).
    """

    def __init__(self, channels_in: int, channels_out: int) -> None:
        """Build with so many channels."""
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, 2, 1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
            nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels_out),
        )
        self.shortcut = nn.Conv2d(channels_in, channels_out, 1, 2)

    def forward(self, images: Tensor) -> Tensor:
        """Apply it."""
        return functional.relu(self.path(images) + self.shortcut(images))


class Net(nn.Sequential):
    """A small residual network. Shapes: (batch, 3, height, width) -> (batch, num_classes)."""

    def __init__(self, num_classes: int, width: int = 16) -> None:
        """Build with `width` channels in the first layer."""
        widths = [width, 2 * width, 4 * width, 8 * width]
        super().__init__(
            nn.Conv2d(3, width, 7, 2, 3),
            nn.ReLU(),
            *(Block(before, after) for before, after in pairwise(widths)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(widths[-1], num_classes),
        )


@dataclass(frozen=True)
class Classify:
    """Cross entropy and accuracy; labels are classes, or with mixup or CutMix their probabilities."""

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int, dict[str, tuple[Tensor, int]]]:
        """Return sums over the batch. Shapes: labels (batch,), or (batch, classes)."""
        images, labels = batch
        scores = model(images)
        loss = functional.cross_entropy(scores, labels, reduction="sum")
        classes = labels if labels.dim() == 1 else labels.argmax(1)
        return loss, len(labels), {"accuracy": ((scores.argmax(1) == classes).sum(), len(labels))}

    def predict(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the most probable class of each image, and the probabilities of all."""
        probability = model(batch[0]).softmax(1)
        return {"label": probability.argmax(1), "probability": probability}
