"""Images through a narrow code and back: an autoencoder, denoising or variational, its error, and what it draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ddpexp.loggers.base import Logger
    from ddpexp.task import EvalSums

_SMALLEST = 8  # sides are halved until they are shorter than this
_SHOWN = 8  # columns of a sheet


class Autoencoder(nn.Module):
    """Convolutions down to a code and back up; variational: the code is drawn from a normal distribution.

    Source: Hinton and Salakhutdinov, "Reducing the dimensionality of data with neural networks", 2006; Kingma and
    Welling, "Auto-encoding variational Bayes", 2014.
    """

    def __init__(self, shape: Sequence[int], latent: int = 16, width: int = 32, variational: bool = False) -> None:
        """Build it for images of `shape` (channels, height, width), whose sides are halved until below 8 pixels.

        Raises: ValueError, if a side cannot be halved at least once.
        """
        super().__init__()
        channels, *sides = shape
        self.shape, self.latent, self.variational = tuple(shape), latent, variational
        counts = [channels]
        while min(sides) >= _SMALLEST and not any(side % 2 for side in sides):
            sides = [side // 2 for side in sides]
            counts.append(width * 2 ** (len(counts) - 1))
        if len(counts) == 1:
            raise ValueError(
                f"images of {' x '.join(map(str, shape[1:]))} pixels cannot be halved: use sides of 8 pixels or more "
                "that are even, for example with data.size"
            )
        pairs = list(pairwise(counts))
        down = [layer for before, after in pairs for layer in (nn.Conv2d(before, after, 4, 2, 1), nn.GELU())]
        up = [
            layer
            for before, after in reversed(pairs)
            for layer in (nn.GELU(), nn.ConvTranspose2d(after, before, 4, 2, 1))
        ]
        grid = (counts[-1], *sides)
        flat = counts[-1] * sides[0] * sides[1]
        self.encoder = nn.Sequential(*down, nn.Flatten(), nn.Linear(flat, latent * (2 if variational else 1)))
        self.decoder = nn.Sequential(nn.Linear(latent, flat), nn.Unflatten(1, grid), *up)

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the code, or its mean and the logarithm of its variance. Shapes: (batch, latent) each."""
        code = self.encoder(images)
        if not self.variational:
            return code, None
        mean, log_variance = code.chunk(2, 1)
        return mean, log_variance.clamp(-20, 20)

    def decode(self, code: Tensor) -> Tensor:
        """Return images, normalized like those of the data. Shapes: (batch, latent) -> (batch, *shape)."""
        return self.decoder(code)  # type: ignore[no-any-return]

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the reconstruction and what `encode` returns; in training a variational code is drawn."""
        mean, log_variance = self.encode(images)
        code = mean
        if log_variance is not None and self.training:
            code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decode(code), mean, log_variance


@dataclass(frozen=True)
class Reconstruct:
    """The squared error of each pixel, and for variational codes `beta` times their divergence from a normal one.

    `noise` is the standard deviation of what is added to the inputs in training (a denoising autoencoder), in units of
    normalized pixels. `std` are those by which the data are normalized.
    """

    beta: float = 1.0
    noise: float = 0.0
    std: Sequence[float] = (1.0,)
    mean: Sequence[float] = (0.0,)

    def step(self, model: Autoencoder, batch: Sequence[Tensor]) -> EvalSums:
        """Return sums over all pixels. Shapes: images (batch, channels, height, width); labels are not used."""
        images = batch[0]
        noisy = images + self.noise * torch.randn_like(images) if self.noise and model.training else images
        found, mean, log_variance = model(noisy)
        squares = (found.float() - images).square()
        count = images.numel()
        loss = squares.sum()
        metrics: dict[str, Any] = {}
        if log_variance is not None:
            divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).float().sum()
            # Per pixel, as the error is: the sum over an image of half the squared errors and of the divergence.
            loss = loss + 2 * self.beta * divergence
            metrics["divergence"] = (divergence.detach(), len(images))
        if not model.training:
            dims = (0, 2, 3)
            metrics["channels"] = (
                torch.stack([squares.sum(dims), images.sum(dims), images.square().sum(dims)]),
                count // images.shape[1],
            )
        return loss, count, metrics

    def finish(self, sums: Mapping[str, Any]) -> Mapping[str, float]:
        """Return the mean squared error of pixels from 0 to 1, its PSNR, and the share of the variance explained."""
        (squares, total, total_squares), count = sums["channels"]
        std = torch.tensor(self.std, dtype=torch.float64).expand(len(squares))
        error = float((squares / count * std.square()).mean())
        variance = float(((total_squares / count - (total / count).square()) * std.square()).mean())
        decibels = -10 * torch.tensor(max(error, 1e-12)).log10()
        explained = 1 - error / variance if variance > 0 else float("nan")
        return {"mse": error, "psnr": float(decibels), "explained_variance": explained}

    def predict(self, model: Autoencoder, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the code and the mean squared error of each image. Shapes: code (batch, latent), error (batch,)."""
        found, code, _ = model(batch[0])
        return {"code": code.float(), "error": (found.float() - batch[0]).square().flatten(1).mean(1)}

    def on_eval(self, model: Autoencoder, batch: Sequence[Tensor], logger: Logger, step: int) -> None:
        """Show images above their reconstructions; of a variational model also what it draws from random codes."""
        images = batch[0][:_SHOWN]
        logger.image("reconstructions", self._sheet(torch.cat((images, model(images)[0]))), step)
        if model.variational:
            noise = torch.randn(4 * _SHOWN, model.latent, generator=torch.Generator().manual_seed(0))
            logger.image("samples", self._sheet(model.decode(noise.to(images.device))), step)

    def _sheet(self, images: Tensor) -> Tensor:
        """Return images side by side. Shapes: (count, channels, height, width) -> (height, width, 3) uint8."""
        images = images.float().cpu()
        channels = images.shape[1]
        mean, std = (torch.tensor(list(values)).view(1, -1, 1, 1) for values in (self.mean, self.std))
        pixels = ((images * std + mean).clamp(0, 1) * 255).to(torch.uint8)
        pixels = pixels.expand(-1, 3, -1, -1) if channels == 1 else pixels[:, :3]
        rows = torch.split(pixels, _SHOWN)
        width = max(len(row) for row in rows)
        blank = pixels.new_full((1, *pixels.shape[1:]), 255)
        full = [torch.cat((row, blank.expand(width - len(row), -1, -1, -1))) for row in rows]
        return torch.cat([row.permute(2, 0, 3, 1).flatten(1, 2) for row in full])
