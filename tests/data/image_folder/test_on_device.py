"""What the device computes of images is what the host computes by Pillow, but for rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from ddpexp.config.compose import compose_command
from ddpexp.config.parse import parse
from ddpexp.config.resolve import ResolvedConfig
from ddpexp.data.image_folder import colors
from ddpexp.data.image_folder.dataset import load
from ddpexp.data.image_folder.device_colors import DEVICE
from ddpexp.data.image_folder.host_colors import HOST
from ddpexp.data.image_folder.images import ImageFolder
from ddpexp.data.image_folder.options import TransformOptions
from ddpexp.data.image_folder.prepare import prepare
from ddpexp.system.hardware import count_gpus
from tests.data.image_folder.conftest import photo
from tests.refusals import refused
from tests.train.test_fuse import Launches

CPU = torch.device("cpu")


def as_tensor(image: Image.Image) -> Tensor:
    pixels = np.asarray(image)
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1).copy()).permute(2, 0, 1).float()


def differing(one: Tensor, other: Tensor, levels: int) -> float:
    """Return the share of values that differ by more than so many levels of 255."""
    assert one.shape == other.shape
    assert torch.equal(one, one.round())
    return float(((one - other).abs() > levels).float().mean())


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("number", range(len(colors.OPERATIONS)))
def test_operations_are_those_of_pillow(number: int, sign: float, mode: str) -> None:
    image = photo(61, 61, number).convert(mode)
    magnitude = 0.41
    expected = as_tensor(colors.OPERATIONS[number](HOST, image, sign * magnitude))
    found = colors.OPERATIONS[number](DEVICE, as_tensor(image), sign * magnitude)
    assert differing(found, expected, 1) < 0.005  # of moved images a few pixels lie between two
    if number:
        assert not torch.equal(found, as_tensor(image)) or torch.equal(found, expected)


@pytest.mark.parametrize("number", range(8))
def test_jitter_is_that_of_pillow(number: int) -> None:
    image, drawn = photo(40, 30, number), np.random.default_rng(number).random(5).tolist()
    strengths = (0.4, 0.4, 0.4, 0.0)
    expected = as_tensor(colors.jitter(image, strengths, drawn, HOST))
    assert differing(colors.jitter(as_tensor(image), strengths, drawn, DEVICE), expected, 2) == 0
    turned = (0.0, 0.0, 0.0, 0.3)
    expected = as_tensor(colors.jitter(image, turned, drawn, HOST))  # Pillow's hue has 8 bits
    assert differing(colors.jitter(as_tensor(image), turned, drawn, DEVICE), expected, 8) == 0


def test_uniform_images_stay_as_they_are() -> None:
    image = torch.full((3, 8, 8), 7.0)
    for number in (9, 12, 13):  # sharpness, autocontrast, equalize
        assert torch.equal(colors.OPERATIONS[number](DEVICE, image, 0.5), image)


def pixels(photos: Path, **options: Any) -> tuple[Tensor, Tensor]:
    """Return a batch of training as levels of 255."""
    train = load(prepare(str(photos), size=16, mean=(0.0,), std=(1.0,), **options)).train
    images, labels = train.of_epoch(3, 1).gather(torch.arange(len(train)), CPU)
    return images * 255, labels


@pytest.mark.parametrize("options", [{}, {"flip": False}, {"channels": 1}, {"cache": "jpeg"}, {"cache_size": 16}])
def test_crops_and_flips_are_those_of_the_host(options: dict[str, Any], photos: Path) -> None:
    host, device = (pixels(photos, augment_on=on, **options) for on in ("host", "device"))
    assert torch.equal(host[1], device[1])
    assert (host[0] - device[0]).abs().max() < 1.01
    assert (host[0] - host[0].flip(3)).abs().max() > 20  # a flip that is left out would be seen


def test_mixed_images_are_those_of_the_host(photos: Path) -> None:
    (host, before), (device, after) = (
        pixels(photos, augment_on=on, mixup=0.4, cutmix=1.0) for on in ("host", "device")
    )
    assert torch.equal(before, after)
    assert (host - device).abs().max() < 1.01


def test_evaluation_does_not_depend_on_where_training_images_are_changed(photos: Path) -> None:
    first, second = (load(prepare(str(photos), size=16, augment_on=on)).evals["eval"] for on in ("host", "device"))
    assert torch.equal(first.gather(torch.arange(4), CPU)[0], second.gather(torch.arange(4), CPU)[0])


def test_changes_are_counted_as_on_the_host() -> None:
    options = TransformOptions(color_jitter=(0.4, 0.4, 0.4, 0.0), rand_augment=2)
    image = photo(33, 33, 5)
    drawn = np.random.default_rng(1).random((colors.JITTERS + 4, 1))
    changes = colors.Changes(options, drawn)
    found = changes.apply(as_tensor(image), 0, DEVICE)
    assert differing(found, as_tensor(changes.apply(image, 0, HOST)), 4) < 0.02


EVERYTHING: dict[str, Any] = {"color_jitter": (0.4, 0.4, 0.4, 0.1), "rand_augment": 2}


def test_the_host_never_waits_for_what_the_device_computes(photos: Path) -> None:
    """Tensors of the device `meta` have no values, so whatever reads one fails."""
    batch = load(prepare(str(photos), size=16, augment_on="device", **EVERYTHING)).train.of_epoch(0, 0)
    image = torch.empty(3, 16, 16, device="meta")
    changes = batch.fetch(torch.arange(12), False).drawn.changes
    for row in range(12):
        changed = changes.apply(image, row, DEVICE)
        assert (changed.device.type, changed.shape) == ("meta", (3, 16, 16))
    for number, operation in enumerate(colors.OPERATIONS):
        assert operation(DEVICE, torch.empty(3, 9, 9, device="meta"), 0.3).shape == (3, 9, 9), number


def test_an_image_takes_two_launches_and_has_the_pixels_that_it_has_by_itself(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = load(prepare(str(photos), size=16, augment_on="device")).train
    batch, indices = train.of_epoch(0, 0), torch.arange(len(train))
    fetched = batch.fetch(indices, False)
    with monkeypatch.context() as patch, Launches() as launches:
        patch.setattr(ImageFolder, "normalized", lambda images, pixels: pixels)  # with numbers of the host
        batch.stage(fetched, torch.device("meta"))
    few = 12  # of the whole batch
    assert launches.counts["_upsample_bilinear2d_aa"] == len(train)
    moves_nothing = ("view", "slice", "permute", "unsqueeze", "select", "empty", "lift_fresh")
    assert sum(number for name, number in launches.counts.items() if name not in moves_nothing) <= 2 * len(train) + few
    alone = torch.cat([batch.gather(indices[row : row + 1], CPU)[0] for row in range(len(train))])
    assert torch.equal(batch.gather(indices, CPU)[0], alone)
    begin, expected = 0, []
    for (_, _, height, width), flipped in zip(
        fetched.drawn.boxes.tolist(), fetched.drawn.flipped.tolist(), strict=True
    ):
        planes = fetched.pixels[begin : begin + height * width * 3].view(1, height, width, 3).permute(0, 3, 1, 2)
        image = functional.interpolate(planes.float(), (16, 16), mode="bilinear", antialias=True).round().clamp(0, 255)
        expected.append(image.flip(3) if flipped else image)
        begin += height * width * 3
    assert torch.equal(batch.images.normalized(torch.cat(expected)), alone)


@pytest.mark.gpu
@pytest.mark.skipif(count_gpus() == 0, reason="there is no GPU here")
def test_a_gpu_computes_what_a_cpu_does(photos: Path) -> None:
    train = load(prepare(str(photos), size=16, augment_on="device", mean=(0.0,), std=(1.0,), **EVERYTHING)).train
    batch, indices = train.of_epoch(0, 0), torch.arange(12)
    images, _ = batch.gather(indices, torch.device("cuda", 0))
    assert ((images.cpu() - batch.gather(indices, CPU)[0]).abs() * 255 > 2).float().mean() < 0.01


def test_images_of_many_sizes_cannot_be_kept_on_the_device() -> None:
    composed = compose_command(["recipe=mnist", "data=image_folder", "data.root=x", "data.on_device=true"])
    assert isinstance(composed, ResolvedConfig)
    with refused("data.on_device=true"):
        parse(composed.values)
