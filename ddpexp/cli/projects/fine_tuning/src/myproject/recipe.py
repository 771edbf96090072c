"""Classes of pictures, by a network that starts from weights it has learned elsewhere: the model and the task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from ddpexp.task import Sums


class Net(nn.Module):
    """Convolutions (`backbone`), which start from given weights, and a new linear layer (`head`).

    Shapes: (batch, 3, any, any) -> (batch, num_classes).
    """

    def __init__(self, num_classes: int, width: int, depth: int) -> None:
        """Build it with `width` channels, a multiple of 8, in the first of `depth` stages."""
        super().__init__()
        widths = [width * 2**stage for stage in range(depth)]
        stages = [_stage(before, after) for before, after in zip([3, *widths[:-1]], widths, strict=True)]
        self.backbone = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the scores."""
        return self.head(self.backbone(pictures))  # type: ignore[no-any-return]


def _stage(before: int, after: int) -> nn.Sequential:
    # GroupNorm looks at one picture at a time: BatchNorm's statistics would depend on the number of workers.
    return nn.Sequential(nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(8, after), nn.ReLU())


@dataclass(frozen=True)
class Classify:
    """Cross entropy and accuracy."""

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        """Return sums over the batch, in training and in evaluation: ddpexp divides by the counts of all workers."""
        pictures, labels = batch
        scores = model(pictures)
        loss = functional.cross_entropy(scores, labels, reduction="sum")
        classes = labels if labels.dim() == 1 else labels.argmax(1)  # data.mixup and data.cutmix give probabilities
        return loss, len(labels), {"accuracy": ((scores.argmax(1) == classes).sum(), len(labels))}

    def predict(self, model: nn.Module, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return a row for each sample, for `ddpexp predict`: its class, and the probability of each class."""
        probability = model(batch[0]).softmax(1)
        return {"label": probability.argmax(1), "probability": probability}
