"""recipe=autoencoder: codes, errors in units of pixels, and random codes of variational models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ddpexp.loggers.base import Logger
from recipes.autoencoder import Autoencoder, Reconstruct

SHAPE = (1, 16, 16)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def build(variational: bool = False) -> Autoencoder:
    torch.manual_seed(0)
    return Autoencoder(SHAPE, latent=3, width=2, variational=variational)


def test_the_errors_are_those_of_pixels_from_0_to_1() -> None:
    model, task, images = build().eval(), Reconstruct(mean=[0.2], std=[0.5]), torch.randn(6, *SHAPE)
    loss, count, metrics = task.step(model, (images, torch.zeros(6)))
    errors = model(images)[0] - images
    torch.testing.assert_close(loss, errors.square().sum())
    assert count == images.numel()
    found = task.finish(metrics)
    mse = float((errors * 0.5).square().mean())
    assert found["mse"] == pytest.approx(mse, rel=1e-5)
    assert found["psnr"] == pytest.approx(-10 * float(torch.tensor(mse).log10()), rel=1e-5)
    variance = float((images * 0.5).var(correction=0))
    assert found["explained_variance"] == pytest.approx(1 - mse / variance, rel=1e-4)
    predicted = task.predict(model, (images,))
    assert predicted["code"].shape == (6, 3)
    torch.testing.assert_close(predicted["error"], errors.square().flatten(1).mean(1))


def test_a_variational_code_is_drawn_in_training_alone_and_costs_its_divergence() -> None:
    model, images = build(variational=True), torch.randn(4, *SHAPE)
    assert not torch.equal(model.train()(images)[0], model(images)[0])
    assert torch.equal(model.eval()(images)[0], model(images)[0])
    mean, log_variance = model.encode(images)
    assert log_variance is not None
    normal = torch.distributions.Normal(mean, (0.5 * log_variance).exp())
    divergence = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0)).sum()
    losses = [Reconstruct(beta=beta).step(model, (images,))[0] for beta in (0.0, 1.0)]
    torch.testing.assert_close(losses[1] - losses[0], 2 * divergence, rtol=1e-2, atol=1e-3)


def test_noise_is_added_in_training_alone() -> None:
    model, images = build(), torch.randn(4, *SHAPE)
    plain, noisy = (Reconstruct(noise=noise) for noise in (0.0, 0.5))
    assert float(plain.step(model.train(), (images,))[0]) != float(noisy.step(model, (images,))[0])
    assert float(plain.step(model.eval(), (images,))[0]) == float(noisy.step(model, (images,))[0])


def test_pictures_are_sheets_of_images() -> None:
    class Pictures(Logger):
        def image(self, name: str, pixels: Tensor, step: int) -> None:
            shown[name] = tuple(pixels.shape)
            assert pixels.dtype == torch.uint8

    shown: dict[str, tuple[int, ...]] = {}
    Reconstruct().on_eval(build(True).eval(), (torch.randn(3, *SHAPE),), Pictures(), 1)
    assert shown == {"reconstructions": (16, 96, 3), "samples": (64, 128, 3)}


def test_images_that_cannot_be_halved_are_refused() -> None:
    with pytest.raises(ValueError, match="images of 15 x 16 pixels cannot be halved"):
        Autoencoder((1, 15, 16))
