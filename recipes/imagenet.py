"""Photographs in a thousand classes, or in your own: ResNets, and the accuracy of the first five guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from ddpexp.task import Sums


def _convolution(before: int, after: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)


class Block(nn.Module):
    """Two convolutions of 3 x 3, or with `bottleneck` one between two of 1 x 1, added to what comes in.

    Shapes: (batch, before, height, width) -> (batch, channels or 4 * channels, height / stride, width / stride).
    """

    def __init__(self, before: int, channels: int, stride: int, bottleneck: bool) -> None:
        """Build it."""
        super().__init__()
        after = channels * (4 if bottleneck else 1)
        self.conv1 = _convolution(before, channels, 1) if bottleneck else _convolution(before, channels, 3, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _convolution(channels, channels, 3, stride if bottleneck else 1)
        self.bn2 = nn.BatchNorm2d(channels)
        if bottleneck:
            self.conv3, self.bn3 = _convolution(channels, after, 1), nn.BatchNorm2d(after)
        self.bottleneck = bottleneck
        self.downsample = None
        if stride > 1 or before != after:
            self.downsample = nn.Sequential(_convolution(before, after, 1, stride), nn.BatchNorm2d(after))
        # The block begins as what it adds to: nothing is added.
        nn.init.zeros_((self.bn3 if bottleneck else self.bn2).weight)

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        if self.bottleneck:
            y = self.bn3(self.conv3(functional.relu(y)))
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """A residual network with torchvision's names, whose files of weights it reads.

    The stride of a bottleneck is that of its 3 x 3 convolution (v1.5). Shapes: (batch, channels, height, width) ->
    (batch, num_classes).

    Source: He, Zhang, Ren and Sun, "Deep residual learning for image recognition", 2016; the last normalization of a
    block begins at zero after Goyal et al., "Accurate, large minibatch SGD", 2017.
    """

    fsdp_blocks = ("Block",)

    def __init__(
        self,
        num_classes: int,
        layers: Sequence[int] = (2, 2, 2, 2),
        bottleneck: bool = False,
        width: int = 64,
        channels: int = 3,
        stem: Literal["imagenet", "small"] = "imagenet",
    ) -> None:
        """Build it with `layers` blocks at each of four sizes; `stem=small` keeps small images at their size first."""
        super().__init__()
        small = stem == "small"
        self.conv1 = _convolution(channels, width, 3) if small else _convolution(channels, width, 7, 2)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        before = width
        for number, count in enumerate(layers, start=1):
            after = width * 2 ** (number - 1)
            blocks = []
            for index in range(count):
                blocks.append(Block(before, after, 2 if number > 1 and index == 0 else 1, bottleneck))
                before = after * (4 if bottleneck else 1)
            self.add_module(f"layer{number}", nn.Sequential(*blocks))
        self.num_stages = len(layers)
        self.fc = nn.Linear(before, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return the score of each class."""
        x = self.maxpool(functional.relu(self.bn1(self.conv1(images))))
        for number in range(1, self.num_stages + 1):
            x = getattr(self, f"layer{number}")(x)
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Classify:
    """Cross entropy with softened labels, and the accuracy of the first and of the first five guesses."""

    label_smoothing: float = 0.1

    def __post_init__(self) -> None:
        """Check the values."""
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"task.label_smoothing={self.label_smoothing}: use 0 for none, or up to 1, such as 0.1")

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        """Return sums over the batch. Shapes: labels (batch,), or probabilities (batch, classes)."""
        images, labels = batch
        scores = model(images).float()
        smoothing = self.label_smoothing if model.training else 0.0
        loss = functional.cross_entropy(scores, labels, reduction="sum", label_smoothing=smoothing)
        classes = labels if labels.dim() == 1 else labels.argmax(1)
        hits = scores.topk(min(5, scores.shape[1]), 1).indices == classes[:, None]
        count = len(labels)
        return loss, count, {"accuracy": (hits[:, 0].sum(), count), "top5": (hits.any(1).sum(), count)}

    def predict(self, model: nn.Module, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the class and the probability of each. Shapes: label (batch,), probability (batch, classes)."""
        probability = model(batch[0]).float().softmax(1)
        return {"label": probability.argmax(1), "probability": probability}
