"""Small color photographs in ten classes, learned in seconds on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from ddpexp.task import Sums

_EPSILON = 5e-4  # added to eigenvalues: weak directions are mostly noise


def whitening(moments: Tensor) -> Tensor:
    """Return filters whose answers to patches are uncorrelated and about equally strong, and their negatives.

    Shapes: moments (values, values), mean products of the values of patches; result (2 * values, values), the
    strongest direction first.
    """
    strengths, directions = torch.linalg.eigh(moments.double())
    filters = (directions / (strengths + _EPSILON).sqrt()).T.flip(0)
    # An eigenvector's sign is arbitrary: here its largest value is positive.
    largest = filters.gather(1, filters.abs().argmax(1, keepdim=True))
    filters = filters * largest.sign()
    return torch.cat((filters, -filters))


def _convolution(before: int, after: int) -> nn.Conv2d:
    """Build a 3 x 3 convolution that begins by passing its first channels on."""
    layer = nn.Conv2d(before, after, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight.data[:before])
    return layer


def _normalization(channels: int) -> nn.BatchNorm2d:
    """Build a normalization without a scale of its own, whose statistics follow within a few steps."""
    layer = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    layer.weight.requires_grad = False
    return layer


class Group(nn.Module):
    """Two convolutions, after the first of which the sides are halved.

    Shapes: (batch, before, side, side) -> (batch, after, side // 2, side // 2).

    Source: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024 (arXiv 2404.00498), as all of this network.
    """

    def __init__(self, before: int, after: int) -> None:
        """Build it."""
        super().__init__()
        self.conv1, self.norm1 = _convolution(before, after), _normalization(after)
        self.conv2, self.norm2 = _convolution(after, after), _normalization(after)

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        x = functional.gelu(self.norm1(functional.max_pool2d(self.conv1(x), 2)))
        return functional.gelu(self.norm2(self.conv2(x)))


class SpeedNet(nn.Module):
    """A whitening layer that is not trained, three groups and a linear layer.

    Shapes: (batch, 3, 32, 32) -> (batch, num_classes).
    """

    fsdp_blocks = ("Group",)

    def __init__(
        self,
        num_classes: int,
        widths: Sequence[int] = (64, 256, 256),
        whiten: Sequence[Sequence[float]] | None = None,
        scale: float = 1 / 9,
    ) -> None:
        """Build it; `whiten` has the moments of patches of 2 x 2, and without it the first layer is trained."""
        super().__init__()
        self.whiten = nn.Conv2d(3, 24, 2)
        nn.init.zeros_(self.whiten.bias)  # type: ignore[arg-type]
        if whiten is not None:
            if len(whiten) != 12 or any(len(row) != 12 for row in whiten):
                raise ValueError("model.whiten needs 12 x 12 moments: use model.whiten=null for data without them")
            self.whiten.weight.data.copy_(whitening(torch.tensor(whiten)).view(24, 3, 2, 2))
            self.whiten.weight.requires_grad = False
        self.groups = nn.Sequential(*(Group(*pair) for pair in zip((24, *widths[:-1]), widths, strict=True)))
        self.head = nn.Linear(widths[-1], num_classes, bias=False)
        self.scale = scale

    def forward(self, images: Tensor) -> Tensor:
        """Return the score of each class."""
        x = self.groups(functional.gelu(self.whiten(images)))
        return self.head(x.amax((2, 3))) * self.scale  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Classify:
    """Cross entropy with softened labels; evaluations average the scores of several views of an image."""

    label_smoothing: float = 0.2
    views: Literal["plain", "mirror", "shift"] = "shift"

    def __post_init__(self) -> None:
        """Check the values."""
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"task.label_smoothing={self.label_smoothing}: use 0 for none, or up to 1, such as 0.2")
        if self.views not in ("plain", "mirror", "shift"):
            raise ValueError(f"task.views={self.views} is no way to evaluate: use plain, mirror or shift")

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        """Return sums over the batch. Shapes: images (batch, channels, side, side), labels (batch,)."""
        images, labels = batch
        scores = (model(images) if model.training else self.scores(model, images)).float()
        smoothing = self.label_smoothing if model.training else 0.0
        loss = functional.cross_entropy(scores, labels, reduction="sum", label_smoothing=smoothing)
        return loss, len(labels), {"accuracy": ((scores.argmax(1) == labels).sum(), len(labels))}

    def scores(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return scores over the views: the image, its mirror image, and both moved by a pixel to either corner.

        The two that are not moved have half of the weight. Shapes: (batch, classes).
        """
        if self.views == "plain":
            return model(images)  # type: ignore[no-any-return]
        if self.views == "mirror":
            return _mirrored(model, images)
        side, other = images.shape[-2:]
        padded = functional.pad(images, (1, 1, 1, 1), "reflect")
        moved = _mirrored(model, padded[..., :side, :other]) + _mirrored(model, padded[..., 2:, 2:])
        return 0.5 * _mirrored(model, images) + 0.25 * moved

    def predict(self, model: nn.Module, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the class and the probability of each. Shapes: label (batch,), probability (batch, classes)."""
        probability = self.scores(model, batch[0]).float().softmax(1)
        return {"label": probability.argmax(1), "probability": probability}


def _mirrored(model: nn.Module, images: Tensor) -> Tensor:
    return 0.5 * model(images) + 0.5 * model(images.flip(-1))  # type: ignore[no-any-return]
