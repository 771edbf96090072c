"""Images drawn by a network that a second one judges: a DCGAN, and a Wasserstein GAN with a penalty on gradients.

Source: Radford, Metz and Chintala, "Unsupervised representation learning with deep convolutional GANs", 2016; two
learning rates after Heusel et al., "GANs trained by a two time-scale update rule", 2017.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, softplus

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ddpexp.loggers.base import Logger
    from ddpexp.task import EvalSums, OptimizerStep, Sums

Images = Sequence[Tensor]  # normalized images (batch, channels, height, width), and labels, which are not used
_SMALLEST = 8  # sides are halved until they are shorter than this
_ODD = 16  # the longest side that is not halved
_POOLED = 8  # pixels on a side, of which `frechet` compares the statistics
_SHOWN = 8  # rows and columns of a sheet
ZERO = torch.zeros((), dtype=torch.float64)  # sums in fp64 have the same bits however workers divide the micro-batches


class Generator(nn.Sequential):
    """Shapes: (batch, latent) -> (batch, *shape), from -1 to 1."""

    def __init__(self, shape: Sequence[int], latent: int, width: int) -> None:
        """Build it; the last hidden layer has `width` channels, each one before twice as many."""
        counts, (height, across) = _halvings(shape, width)
        layers: list[nn.Module] = [
            nn.Linear(latent, counts[-1] * height * across, bias=False),
            nn.Unflatten(1, (counts[-1], height, across)),
        ]
        for before, after in pairwise(reversed(counts)):
            layers += [nn.BatchNorm2d(before), nn.ReLU(), nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False)]
        layers[-1] = nn.ConvTranspose2d(counts[1], counts[0], 4, 2, 1)
        super().__init__(*layers, nn.Tanh())


class Discriminator(nn.Sequential):
    """Shapes: (batch, *shape) -> (batch, 1), above 0 for images that look real."""

    def __init__(self, shape: Sequence[int], width: int) -> None:
        """Build it; the first hidden layer has `width` channels, each further one twice as many."""
        counts, (height, across) = _halvings(shape, width)
        pairs = pairwise(counts)
        layers = [layer for before, after in pairs for layer in (nn.Conv2d(before, after, 4, 2, 1), nn.LeakyReLU(0.2))]
        super().__init__(*layers, nn.Flatten(), nn.Linear(counts[-1] * height * across, 1))


def networks(shape: Sequence[int], latent: int = 64, width: int = 32) -> dict[str, nn.Module]:
    """Build both networks for images of `shape` (channels, height, width).

    Raises: ValueError, if the images cannot be halved often enough.
    """
    return {"generator": Generator(shape, latent, width), "discriminator": Discriminator(shape, width)}


def _halvings(shape: Sequence[int], width: int) -> tuple[list[int], list[int]]:
    """Return the channels after each halving of images, and the height and width after the last one."""
    channels, *sides = shape
    counts = [channels]
    while min(sides) >= _SMALLEST and not any(side % 2 for side in sides):
        sides = [side // 2 for side in sides]
        counts.append(width * 2 ** (len(counts) - 1))
    if len(counts) == 1 or max(sides) >= _ODD:
        raise ValueError(
            f"images of {' x '.join(map(str, shape[1:]))} pixels cannot be halved down to fewer than {_ODD}: use sides "
            "such as 28, 32 or 64, for example with data.size"
        )
    return counts, sides


@dataclass(frozen=True)
class GAN:
    """Two networks with a loss and an optimizer each; the generator's rate is optimizer.lr.

    `mean` and `std` are those by which the data are normalized.
    """

    discriminator_lr: float
    mean: Sequence[float] = (0.5,)
    std: Sequence[float] = (0.5,)

    def optimizers(self, model: Mapping[str, nn.Module], make: Any) -> Mapping[str, Optimizer]:
        """Return both; the schedule multiplies both rates."""
        return {
            "generator": make(model["generator"].parameters()),
            "discriminator": make([{"params": model["discriminator"].parameters(), "lr": self.discriminator_lr}]),
        }

    def train_step(self, update: OptimizerStep, batches: list[Images]) -> Sums:
        """Step the discriminator, then the generator."""
        generator, discriminator = update.models["generator"], update.models["discriminator"]
        count, losses = 0, {"discriminator": ZERO, "generator": ZERO}
        for number, (images, *_) in enumerate(batches, start=1):
            with update.micro_batch(last=number == len(batches)) as micro_batch:
                with torch.no_grad():
                    fakes = generator(noise_for(images, generator))
                loss = discriminator_loss(discriminator(self.pixels(images)), discriminator(fakes))
                micro_batch.backward(loss, len(images))
            count += len(images)
            losses["discriminator"] = losses["discriminator"] + loss.detach()
        update.apply("discriminator")
        for number, (images, *_) in enumerate(batches, start=1):
            with update.micro_batch(last=number == len(batches)) as micro_batch:
                loss = softplus(-discriminator(generator(noise_for(images, generator))).float()).sum()
                micro_batch.backward(loss, len(images))
            losses["generator"] = losses["generator"] + loss.detach()
        update.apply("generator")
        return losses["discriminator"], count, {f"{name}_loss": (total, count) for name, total in losses.items()}

    def step(self, model: Mapping[str, nn.Module], batch: Images) -> EvalSums:
        """Return the discriminator's loss on images that it has not seen; called in evaluations only."""
        images = batch[0]
        real = self.pixels(images)
        fake = model["generator"](noise_of(images, _latent(model["generator"])))
        scores = {"real": model["discriminator"](real), "fake": model["discriminator"](fake)}
        count = len(images)
        metrics: dict[str, Any] = {f"{name}_score": (one.sigmoid().sum(), count) for name, one in scores.items()}
        metrics |= {f"{name}_pixels": (_moments(one), count) for name, one in (("real", real), ("fake", fake))}
        return discriminator_loss(scores["real"], scores["fake"]), count, metrics

    def finish(self, sums: Mapping[str, Any]) -> Mapping[str, float]:
        """Return the Fréchet distance between small copies of the images and as many drawn ones."""
        return {"frechet": frechet(*(_mean_and_covariance(*sums[f"{name}_pixels"]) for name in ("real", "fake")))}

    def on_eval(self, model: Mapping[str, nn.Module], batch: Images, logger: Logger, step: int) -> None:
        """Show images that the generator draws, always from the same noise."""
        generator, device = model["generator"], batch[0].device
        images = generator(fixed_noise(_SHOWN**2, _latent(generator), device)).float().cpu()
        images = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images[:, :3]
        rows = images.unflatten(0, (_SHOWN, _SHOWN)).permute(0, 3, 1, 4, 2).flatten(0, 1).flatten(1, 2)
        logger.image("samples", ((rows + 1) * 127.5).to(torch.uint8), step)

    def pixels(self, images: Tensor) -> Tensor:
        """Undo the normalization: from -1 to 1, as the generator draws."""
        std, mean = (torch.tensor(list(one), device=images.device).view(1, -1, 1, 1) for one in (self.std, self.mean))
        return (images * std + mean) * 2 - 1


@dataclass(frozen=True)
class WassersteinGAN(GAN):
    """The discriminator is a critic with a penalty on its gradient, and steps more often than the generator.

    Source: Gulrajani et al., "Improved training of Wasserstein GANs", 2017.
    """

    penalty: float = 10.0
    generator_every: int = 5  # steps

    def train_step(self, update: OptimizerStep, batches: list[Images]) -> Sums:
        """Step the critic, and the generator where it is due."""
        generator, critic = update.models["generator"], update.models["discriminator"]
        count, losses = 0, {"discriminator": ZERO, "generator": ZERO}
        for number, (images, *_) in enumerate(batches, start=1):
            with update.micro_batch(last=number == len(batches)) as micro_batch:
                real = self.pixels(images)
                with torch.no_grad():
                    fake = generator(noise_for(images, generator)).float()
                between = torch.lerp(real, fake, torch.rand(len(real), 1, 1, 1, device=real.device)).requires_grad_()
                [slope] = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
                excess = slope.float().flatten(1).norm(dim=1) - 1
                loss = (critic(fake) - critic(real)).float().sum() + self.penalty * excess.square().sum()
                micro_batch.backward(loss, len(images))
            count += len(images)
            losses["discriminator"] = losses["discriminator"] + loss.detach()
        update.apply("discriminator")
        if generator_steps := (update.step + 1) % self.generator_every == 0:
            for number, (images, *_) in enumerate(batches, start=1):
                with update.micro_batch(last=number == len(batches)) as micro_batch:
                    loss = -critic(generator(noise_for(images, generator))).float().sum()
                    micro_batch.backward(loss, len(images))
                losses["generator"] = losses["generator"] + loss.detach()
            update.apply("generator")
        counts = {"discriminator": count, "generator": count if generator_steps else 0}
        return losses["discriminator"], count, {f"{name}_loss": (losses[name], counts[name]) for name in losses}


def noise_for(images: Tensor, generator: Any) -> Tensor:
    """Draw noise for a micro-batch, whose random numbers the loop seeds, so that a resumed run draws the same."""
    return torch.randn(len(images), _latent(generator), device=images.device)


def noise_of(images: Tensor, latent: int) -> Tensor:
    """Return noise that depends on each image alone: the same at every number of workers, and in every evaluation."""
    numbers = torch.Generator()
    rows = [
        torch.randn(latent, generator=numbers.manual_seed(zlib.crc32(image.tobytes())))
        for image in images.float().cpu().numpy()
    ]
    return torch.stack(rows).to(images.device)


def fixed_noise(count: int, latent: int, device: torch.device) -> Tensor:
    """Return the same noise in every evaluation."""
    return torch.randn(count, latent, generator=torch.Generator().manual_seed(0)).to(device)


def discriminator_loss(real: Tensor, fake: Tensor) -> Tensor:
    """Return the sum over real and drawn images."""
    return softplus(-real.float()).sum() + softplus(fake.float()).sum()


def frechet(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> float:
    """Return the Fréchet distance between two normal distributions, given by mean and covariance.

    It is computed in the way of FID, but from pixels: compare it only with itself.

    Source: Dowson and Landau, "The Fréchet distance between multivariate normal distributions", 1982.
    """
    values, vectors = torch.linalg.eigh(one[1])
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    mixed = torch.linalg.eigvalsh(root @ other[1] @ root).clamp(min=0).sqrt().sum()
    return float((one[0] - other[0]).square().sum() + one[1].trace() + other[1].trace() - 2 * mixed)


def _latent(generator: Any) -> int:
    """Return how many random numbers an image is drawn from; the generator may be wrapped."""
    first = next(module for module in generator.modules() if isinstance(module, nn.Linear))
    return first.in_features


def _moments(images: Tensor) -> Tensor:
    """Return the sums over images of their small copies and of the products of these. Shapes: (n + 1, n)."""
    size = min(_POOLED, *images.shape[2:])
    small = adaptive_avg_pool2d(images.float(), size).flatten(1).double()
    return torch.cat((small.sum(0, keepdim=True), small.T @ small))


def _mean_and_covariance(moments: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    mean = moments[0] / count
    return mean, moments[1:] / count - torch.outer(mean, mean)
