"""Handwritten digits: small networks, cross entropy, accuracy, and pictures of what the network thinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from ddpexp.loggers.base import Logger


class LeNet(nn.Sequential):
    """Two convolutions with pooling, one hidden layer. Shapes: (batch, 1, 28, 28) -> (batch, 10).

    Source: LeCun, Bottou, Bengio and Haffner, "Gradient-based learning applied to document recognition", 1998.
    """

    def __init__(self, width: Sequence[int] = (16, 32), hidden: int = 128) -> None:
        """Build with `width` channels in the two convolutions."""
        first, second = width
        super().__init__(
            nn.Conv2d(1, first, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(first, second, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(second * 16, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 10),
        )


class Linear(nn.Sequential):
    """One linear layer. Shapes: (batch, 1, 28, 28) -> (batch, 10)."""

    def __init__(self) -> None:
        """Build it."""
        super().__init__(nn.Flatten(), nn.Linear(784, 10))


@dataclass(frozen=True)
class Classify:
    """Cross entropy and accuracy over ten classes."""

    label_smoothing: float = 0.0

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int, dict[str, tuple[Tensor, int]]]:
        """Return sums over the batch. Shapes: images (batch, 1, 28, 28), labels (batch,)."""
        images, labels = batch
        scores = model(images)
        smoothing = self.label_smoothing if model.training else 0.0
        loss = functional.cross_entropy(scores, labels, reduction="sum", label_smoothing=smoothing)
        correct = (scores.argmax(1) == labels).sum()
        return loss, len(labels), {"accuracy": (correct, len(labels))}

    def predict(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the digit and the probability of each. Shapes: label (batch,), probability (batch, 10)."""
        probability = model(batch[0]).softmax(1)
        return {"label": probability.argmax(1), "probability": probability}

    def on_eval(self, model: nn.Module, batch: tuple[Tensor, Tensor], logger: Logger, step: int) -> None:
        """Show the first images of the evaluation with what the network takes them for; other inputs are not shown."""
        if batch[0].dim() != 4:
            return
        images, labels = batch[0][:32], batch[1][:32]
        guesses = model(images).argmax(1)
        logger.image("predictions", _grid(images.cpu(), guesses.tolist(), labels.tolist()), step)


def _grid(images: Tensor, guesses: list[int], labels: list[int], columns: int = 8, size: int = 56) -> Tensor:
    """Draw images with the guess below, in red where it is wrong. Shapes.

    (rows * (size + 14), columns * size, 3) uint8.
    """
    import numpy as np
    from PIL import Image, ImageDraw

    low, high = images.amin(), images.amax()
    grey = ((images[:, 0] - low) / (high - low) * 255).to(torch.uint8).numpy()
    rows = -(-len(grey) // columns)
    sheet = Image.new("RGB", (columns * size, rows * (size + 14)), "white")
    pen = ImageDraw.Draw(sheet)
    for place, (image, guess, label) in enumerate(zip(grey, guesses, labels, strict=True)):
        left, top = place % columns * size, place // columns * (size + 14)
        sheet.paste(Image.fromarray(255 - image).resize((size, size), Image.Resampling.NEAREST), (left, top))
        right = guess == label
        pen.text(
            (left + 4, top + size), str(guess) if right else f"{guess} (is {label})", fill="black" if right else "red"
        )
    return torch.from_numpy(np.array(sheet))
