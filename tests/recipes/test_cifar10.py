"""The whitening layer and the views of evaluations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpexp.data.cifar10 import synthetic
from ddpexp.data.cifar10.prepare import MEAN, STD, patch_moments
from recipes.cifar10 import Classify, SpeedNet, whitening


def test_whitened_patches_are_uncorrelated_and_equally_strong() -> None:
    pixels, _ = synthetic.draw(64, 1)
    moments = torch.tensor(patch_moments(pixels.tobytes()), dtype=torch.float64)
    mean, std = (torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1) for values in (MEAN, STD))
    images = (torch.from_numpy(pixels).double() / 255 - mean) / std
    filters = whitening(moments)
    answers = nn.functional.conv2d(images, filters.view(24, 3, 2, 2)).transpose(0, 1).reshape(24, -1)
    assert torch.equal(filters[12:], -filters[:12])
    strengths = torch.linalg.eigvalsh(moments).flip(0)
    expected = torch.diag(strengths / (strengths + 5e-4))
    torch.testing.assert_close(answers[:12] @ answers[:12].T / answers.shape[1], expected, atol=1e-3, rtol=0)


def test_the_first_layer_is_trained_only_without_moments() -> None:
    moments = torch.eye(12).tolist()
    assert not SpeedNet(10, (4, 4, 4), moments).whiten.weight.requires_grad
    assert SpeedNet(10, (4, 4, 4)).whiten.weight.requires_grad
    with pytest.raises(ValueError, match=r"model\.whiten=null"):
        SpeedNet(10, (4, 4, 4), moments[:3])


@pytest.mark.parametrize(("views", "calls"), [("plain", 1), ("mirror", 2), ("shift", 6)])
def test_views_of_an_even_image_have_its_scores(views: str, calls: int) -> None:
    seen: list[torch.Tensor] = []

    def model(images: torch.Tensor) -> torch.Tensor:
        seen.append(images)
        return images.mean((2, 3))

    images = torch.arange(6.0).view(2, 3, 1, 1).expand(2, 3, 8, 8)
    scores = Classify(views=views).scores(model, images)  # type: ignore[arg-type]
    torch.testing.assert_close(scores, images.mean((2, 3)))
    assert len(seen) == calls
    assert all(part.shape == images.shape for part in seen)


def test_mirrored_views_make_scores_even() -> None:
    images = torch.rand(2, 3, 32, 32)
    model = SpeedNet(10, (4, 4, 4)).eval()
    one, other = (Classify(views="mirror").scores(model, part) for part in (images, images.flip(-1)))
    torch.testing.assert_close(one, other)
    assert not torch.allclose(model(images), model(images.flip(-1)))


def test_an_unknown_view_is_refused() -> None:
    with pytest.raises(ValueError, match=r"task\.views=twice"):
        Classify(views="twice")  # type: ignore[arg-type]
