"""What the peers train, as a user's recipe: their models, and nothing but the loss."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from benchmarks.peers import common


def model(name: str) -> nn.Module:
    """Build the peers' model, with their weights."""
    return common.model(name)


class Loss:
    """Cross entropy alone, as in the peers' loops."""

    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int, dict[str, tuple[Tensor, int]]]:
        """Return the sum over the batch. Shapes: images (batch, 1, 28, 28), labels (batch,)."""
        images, labels = batch
        return functional.cross_entropy(model(images), labels, reduction="sum"), len(labels), {}
