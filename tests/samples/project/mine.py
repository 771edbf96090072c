"""A user's recipe: sequences of tokens, summed and classified, with tied weights, batch statistics and a buffer of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.data.datasets import Arrays, Splits


def sequences(samples: int, seed: int) -> Arrays:
    """Make sequences of six tokens, labelled by the token that follows their sum. Shapes: (samples, 6), (samples,), int64."""
    tokens = torch.randint(0, 8, (samples, 6), generator=torch.Generator().manual_seed(seed))
    return Arrays((tokens, tokens.sum(1) % 8))


def load(samples: int) -> Splits:
    """Make a set to train on and one to evaluate."""
    return Splits(train=sequences(samples, 0), evals={"eval": sequences(40, 1)})


class Net(nn.Module):
    """Embed, mix, and classify with the embedding's own weights."""

    turned: Tensor

    def __init__(self, width: int) -> None:
        """Build with so many features."""
        super().__init__()
        self.embed = nn.Embedding(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.mix = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, 8)
        self.head.weight = self.embed.weight
        self.register_buffer("turned", torch.zeros(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores. Shapes: (batch, 6) int64 to (batch, 8)."""
        if self.training:
            self.turned += 1
        hidden: Tensor = self.norm(self.embed(tokens).sum(1))
        scores: Tensor = self.head(self.drop(torch.tanh(self.mix(hidden))))
        return scores


class Classify:
    """Learn the labels."""

    def step(self, model: Any, batch: Any) -> tuple[Tensor, int, Mapping[str, tuple[Tensor, int]]]:
        """Return the loss and the accuracy."""
        tokens, labels = batch
        scores = model(tokens)
        loss = functional.cross_entropy(scores, labels, reduction="sum")
        return loss, len(labels), {"accuracy": ((scores.argmax(1) == labels).sum(), len(labels))}
