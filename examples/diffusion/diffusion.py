"""Points in a plane by diffusion: a network learns to remove noise, and makes points of noise step by step.

Source: Ho et al., "Denoising diffusion probabilistic models", 2020.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.data.datasets import Arrays, Splits
from ddpexp.loggers.base import Logger
from ddpexp.task import Sums

SPOTS, SPREAD = 8, 0.1  # on a circle; of the points of one
Points = tuple[Tensor]  # Shapes: (batch, 2)


def load(train: int, test: int) -> Splits:
    return Splits(Arrays(draw(train, 0)), {"eval": Arrays(draw(test, 1))})


def draw(count: int, seed: int) -> Points:
    generator = torch.Generator().manual_seed(seed)
    spots = torch.randint(SPOTS, (count,), generator=generator)
    return (centers()[spots] + torch.randn(count, 2, generator=generator) * SPREAD,)


def centers() -> Tensor:
    angles = torch.arange(SPOTS) * (2 * math.pi / SPOTS)
    return torch.stack([angles.cos(), angles.sin()], 1)


class Denoiser(nn.Module):
    """The noise in noisy points. `kept` is the share of the variance that is the points', at each time."""

    kept: Tensor

    def __init__(self, width: int, num_times: int) -> None:
        super().__init__()
        self.times = nn.Embedding(num_times, width)
        self.entry = nn.Linear(2, width)
        self.body = nn.Sequential(
            nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(0.001, 0.2, num_times), 0))

    def forward(self, noisy: Tensor, times: Tensor) -> Tensor:
        noise: Tensor = self.body(self.entry(noisy) + self.times(times))
        return noise

    @torch.no_grad()
    def sample(self, points: Tensor) -> Tensor:
        """Turn noise into points: each step removes what is noise in them, and adds some of the time before."""
        for time in reversed(range(len(self.kept))):
            kept, before = self.kept[time], self.kept[time - 1] if time else torch.ones_like(self.kept[0])
            share = kept / before
            noise = self(points, torch.full((len(points),), time, device=points.device))
            points = (points - (1 - share) / (1 - kept).sqrt() * noise) / share.sqrt()
            points = points + ((1 - before) / (1 - kept) * (1 - share)).sqrt() * torch.randn_like(points)
        return points


class Diffusion:
    def step(self, model: Denoiser, batch: Points) -> Sums:
        (points,) = batch
        times = torch.randint(len(model.kept), (len(points),), device=points.device)
        noise, kept = torch.randn_like(points), model.kept[times, None]
        found = model(kept.sqrt() * points + (1 - kept).sqrt() * noise, times)
        loss = functional.mse_loss(found, noise, reduction="sum")
        if model.training:
            return loss, noise.numel(), {}
        samples = model.sample(torch.randn_like(points))  # by the average of the weights
        nearest = torch.cdist(samples, centers().to(samples)).amin(1)
        return loss, noise.numel(), {"on_a_spot": ((nearest < 3 * SPREAD).sum(), len(points))}

    def on_eval(self, model: Denoiser, batch: Points, logger: Logger, step: int) -> None:
        samples = model.sample(torch.randn(2000, 2).to(model.kept))
        density, _ = torch.histogramdd(samples.float().cpu(), 64, range=[-1.5, 1.5, -1.5, 1.5])
        logger.image("samples", (density / density.amax()).expand(3, -1, -1), step)
