"""A variational autoencoder of pictures; the weight of its KL divergence grows to 1 in the first part of a run.

Source: Kingma and Welling, "Auto-encoding variational Bayes", 2014; Bowman et al., "Generating sentences from a
continuous space", 2016.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ddpexp.data.datasets import Arrays, Splits
from ddpexp.task import NamedSums, Progress

SIZE = 8  # of a picture


def load(train: int, test: int) -> Splits:
    return Splits(Arrays([draw(train, 0)]), {"eval": Arrays([draw(test, 1)])})


def draw(count: int, seed: int) -> Tensor:
    """Draw pictures of bars, each of a whole row or column. Shapes: (count, 64), of 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.rand(2, count, SIZE, generator=generator) < 0.15).unbind()
    return (rows[:, :, None] | columns[:, None, :]).flatten(1).float()


class VAE(nn.Module):
    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(SIZE**2, width), nn.ReLU(), nn.Linear(width, 2 * features))
        self.decoder = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, SIZE**2))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scores of the pixels, and the mean and the logarithm of the variance of the code."""
        mean, log_variance = self.encoder(pictures).chunk(2, 1)
        code = mean + (log_variance / 2).exp() * torch.randn_like(mean) if self.training else mean
        return self.decoder(code), mean, log_variance


@dataclass(frozen=True)
class Bound:
    """The evidence lower bound: the error of the pixels and the KL divergence of the code, for each picture."""

    annealing: float  # the part of the run in which the weight grows

    def step(self, model: nn.Module, batch: tuple[Tensor], progress: Progress) -> NamedSums:
        [pictures] = batch
        scores, mean, log_variance = model(pictures)
        error = binary_cross_entropy_with_logits(scores, pictures, reduction="sum")
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum() / 2
        weight = min(1.0, progress.fraction / self.annealing)
        return {"pixels": (error, len(pictures)), "divergence": (divergence, len(pictures), weight)}, {}
