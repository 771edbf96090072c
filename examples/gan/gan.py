"""A small DCGAN that draws handwritten digits.

Source: Radford, Metz and Chintala, "Unsupervised representation learning with deep convolutional GANs", 2016; two
learning rates after Heusel et al., "GANs trained by a two time-scale update rule", 2017.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import Optimizer

from ddpexp.loggers.base import Logger
from ddpexp.task import OptimizerStep, Sums

Images = tuple[Tensor, Tensor]  # of data=mnist: normalized images (batch, 1, 28, 28), and labels, which are not used
LATENT_SIZE = 64
ZERO = torch.zeros((), dtype=torch.float64)  # sums in fp64 have the same bits however workers divide the micro-batches


class Generator(nn.Sequential):
    """Shapes: (batch, 64) -> (batch, 1, 28, 28), from -1 to 1."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Linear(LATENT_SIZE, 2 * width * 49, bias=False),
            nn.Unflatten(1, (2 * width, 7, 7)),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
            nn.Tanh(),
        )


class Discriminator(nn.Sequential):
    """Shapes: (batch, 1, 28, 28) -> (batch, 1), above 0 for images that look real."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Conv2d(1, width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(2 * width * 49, 1),
        )


def networks(width: int) -> dict[str, nn.Module]:
    return {"generator": Generator(width), "discriminator": Discriminator(width)}


@dataclass(frozen=True)
class GAN:
    discriminator_lr: float  # the generator's is optimizer.lr; the schedule multiplies both

    def optimizers(self, model: Mapping[str, nn.Module], make: Any) -> Mapping[str, Optimizer]:
        return {
            "generator": make(model["generator"].parameters()),
            "discriminator": make([{"params": model["discriminator"].parameters(), "lr": self.discriminator_lr}]),
        }

    def train_step(self, update: OptimizerStep, batches: list[Images]) -> Sums:
        generator, discriminator = update.models["generator"], update.models["discriminator"]
        count, losses = 0, {"discriminator": ZERO, "generator": ZERO}
        for number, (images, _) in enumerate(batches, start=1):
            with update.micro_batch(last=number == len(batches)):
                with torch.no_grad():
                    fakes = generator(noise_for(images))
                loss = discriminator_loss(discriminator(pixels(images)), discriminator(fakes))
                update.backward(loss, len(images))
            count += len(images)
            losses["discriminator"] = losses["discriminator"] + loss.detach()
        update.apply("discriminator")
        for number, (images, _) in enumerate(batches, start=1):
            with update.micro_batch(last=number == len(batches)):
                loss = softplus(-discriminator(generator(noise_for(images))).float()).sum()
                update.backward(loss, len(images))
            losses["generator"] = losses["generator"] + loss.detach()
        update.apply("generator")
        return losses["discriminator"], count, {f"{name}_loss": (total, count) for name, total in losses.items()}

    def step(self, model: Mapping[str, nn.Module], batch: Images) -> Sums:
        """The discriminator's loss on images that it has not seen; called in evaluations only."""
        images, _ = batch
        real = model["discriminator"](pixels(images))
        fake = model["discriminator"](model["generator"](fixed_noise(len(images), images.device)))
        scores = {"real_score": (real.sigmoid().sum(), len(images)), "fake_score": (fake.sigmoid().sum(), len(images))}
        return discriminator_loss(real, fake), len(images), scores

    def on_eval(self, model: Mapping[str, nn.Module], batch: Images, logger: Logger, step: int) -> None:
        images = model["generator"](fixed_noise(64, batch[0].device)).float().cpu()
        sheet = images.reshape(8, 8, 28, 28).transpose(1, 2).reshape(8 * 28, 8 * 28)
        logger.image("samples", ((sheet + 1) * 127.5).to(torch.uint8)[:, :, None].expand(-1, -1, 3), step)


@dataclass(frozen=True)
class WassersteinGAN(GAN):
    """The discriminator is a critic with a penalty on its gradient, and steps more often than the generator.

    Source: Gulrajani et al., "Improved training of Wasserstein GANs", 2017.
    """

    penalty: float = 10.0
    generator_every: int = 5  # steps

    def train_step(self, update: OptimizerStep, batches: list[Images]) -> Sums:
        generator, critic = update.models["generator"], update.models["discriminator"]
        count, losses = 0, {"discriminator": ZERO, "generator": ZERO}
        for number, (images, _) in enumerate(batches, start=1):
            with update.micro_batch(last=number == len(batches)):
                real = pixels(images)
                with torch.no_grad():
                    fake = generator(noise_for(images)).float()
                between = torch.lerp(real, fake, torch.rand(len(real), 1, 1, 1, device=real.device)).requires_grad_()
                [slope] = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
                excess = slope.float().flatten(1).norm(dim=1) - 1
                loss = (critic(fake) - critic(real)).float().sum() + self.penalty * excess.square().sum()
                update.backward(loss, len(images))
            count += len(images)
            losses["discriminator"] = losses["discriminator"] + loss.detach()
        update.apply("discriminator")
        if generator_steps := (update.step + 1) % self.generator_every == 0:
            for number, (images, _) in enumerate(batches, start=1):
                with update.micro_batch(last=number == len(batches)):
                    loss = -critic(generator(noise_for(images))).float().sum()
                    update.backward(loss, len(images))
                losses["generator"] = losses["generator"] + loss.detach()
            update.apply("generator")
        counts = {"discriminator": count, "generator": count if generator_steps else 0}
        return losses["discriminator"], count, {f"{name}_loss": (losses[name], counts[name]) for name in losses}


def pixels(images: Tensor) -> Tensor:
    """Undo the normalization of data=mnist: from -1 to 1, as the generator draws."""
    return (images * 0.3081 + 0.1307) * 2 - 1


def noise_for(images: Tensor) -> Tensor:
    """The loop seeds the random numbers of each micro-batch, so a resumed run draws the same."""
    return torch.randn(len(images), LATENT_SIZE, device=images.device)


def fixed_noise(count: int, device: torch.device) -> Tensor:
    """Return the same noise in every evaluation."""
    return torch.randn(count, LATENT_SIZE, generator=torch.Generator().manual_seed(0)).to(device)


def discriminator_loss(real: Tensor, fake: Tensor) -> Tensor:
    return softplus(-real.float()).sum() + softplus(fake.float()).sum()
