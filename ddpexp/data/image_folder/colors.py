"""Changes of colors and RandAugment, drawn beforehand for a batch and applied to one image at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from ddpexp.data.image_folder import draws
from ddpexp.data.image_folder.options import Options

JITTERS = 5  # numbers drawn for a jitter: four strengths and the order
BINS = 30  # of magnitudes
GREY = 128  # of what a geometric operation moves into the image
_ENHANCE = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
ORDERS = tuple(
    (a, b, c, d) for a in range(4) for b in range(4) for c in range(4) for d in range(4) if len({a, b, c, d}) == 4
)


@dataclass(frozen=True)
class Changes:
    """The numbers drawn for the images of a batch. Shapes: drawn (count, batch)."""

    options: Options
    drawn: NDArray[np.float64]

    def apply(self, pixels: NDArray[np.uint8], row: int) -> NDArray[np.uint8]:
        """Return an image with its changes. Shapes: (size, size, channels)."""
        image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else np.ascontiguousarray(pixels))
        numbers = self.drawn[:, row].tolist()
        if any(self.options.color_jitter):
            image = jitter(image, self.options.color_jitter, numbers[:JITTERS])
        magnitude = self.options.rand_augment_magnitude / BINS
        for place in range(self.options.rand_augment):
            which, sign = numbers[JITTERS + 2 * place : JITTERS + 2 * place + 2]
            operation = OPERATIONS[int(which * len(OPERATIONS))]
            image = operation(image, magnitude, -1.0 if sign < 0.5 else 1.0)
        changed: NDArray[np.uint8] = np.asarray(image).reshape(pixels.shape)
        return changed


def draw(key: int, samples: NDArray[np.int64], options: Options) -> Changes | None:
    """Draw the changes of samples; None if there are to be none."""
    if not any(options.color_jitter) and not options.rand_augment:
        return None
    return Changes(options, draws.changes(key, samples, JITTERS + 2 * options.rand_augment))


def jitter(image: Image.Image, strengths: tuple[float, ...], numbers: list[float]) -> Image.Image:
    """Change brightness, contrast, saturation and hue, in a random order, as torchvision's ColorJitter does."""
    for kind in ORDERS[int(numbers[4] * len(ORDERS))]:
        strength = strengths[kind]
        if not strength:
            continue
        amount = (2 * numbers[kind] - 1) * strength
        image = _ENHANCE[kind](image).enhance(1 + amount) if kind < 3 else _hue(image, amount)
    return image


def _hue(image: Image.Image, amount: float) -> Image.Image:
    if image.mode == "L":
        return image
    hue, saturation, value = image.convert("HSV").split()
    turned = hue.point([(number + round(amount * 255)) % 256 for number in range(256)])
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")


def _affine(
    matrix: Callable[[float, int], tuple[float, float, float, float, float, float]], most: float
) -> Callable[[Image.Image, float, float], Image.Image]:
    def operation(image: Image.Image, magnitude: float, sign: float) -> Image.Image:
        data = matrix(sign * magnitude * most, image.width)
        fill = GREY if image.mode == "L" else (GREY,) * 3
        return image.transform(image.size, Image.Transform.AFFINE, data, Image.Resampling.NEAREST, fillcolor=fill)

    return operation


def _enhanced(kind: int) -> Callable[[Image.Image, float, float], Image.Image]:
    return lambda image, magnitude, sign: _ENHANCE[kind](image).enhance(1 + sign * 0.9 * magnitude)


def _rotated(image: Image.Image, magnitude: float, sign: float) -> Image.Image:
    fill = GREY if image.mode == "L" else (GREY,) * 3
    return image.rotate(sign * 30 * magnitude, Image.Resampling.NEAREST, fillcolor=fill)


# Source: Cubuk et al., "RandAugment", 2020; the ranges are those of torchvision.
OPERATIONS: tuple[Callable[[Image.Image, float, float], Image.Image], ...] = (
    lambda image, magnitude, sign: image,
    _affine(lambda amount, width: (1, amount, 0, 0, 1, 0), 0.3),  # shear
    _affine(lambda amount, width: (1, 0, 0, amount, 1, 0), 0.3),
    _affine(lambda amount, width: (1, 0, amount * width, 0, 1, 0), 150 / 331),  # shift
    _affine(lambda amount, width: (1, 0, 0, 0, 1, amount * width), 150 / 331),
    _rotated,
    _enhanced(0),
    _enhanced(2),
    _enhanced(1),
    lambda image, magnitude, sign: ImageEnhance.Sharpness(image).enhance(1 + sign * 0.9 * magnitude),
    lambda image, magnitude, sign: ImageOps.posterize(image, 8 - round(4 * magnitude)),
    lambda image, magnitude, sign: ImageOps.solarize(image, round(255 * (1 - magnitude))),
    lambda image, magnitude, sign: ImageOps.autocontrast(image),
    lambda image, magnitude, sign: ImageOps.equalize(image),
)
