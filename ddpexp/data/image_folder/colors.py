"""Changes of colors and RandAugment, drawn beforehand for a batch and applied to one image at a time.

Which changes there are, and their order, is here; `host_colors` computes them by Pillow, and `device_colors` by torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ddpexp.data.image_folder import draws
from ddpexp.data.image_folder.options import TransformOptions

T = TypeVar("T")

JITTERS = 5  # numbers drawn for a jitter: four strengths and the order
GREY = 128  # of what a geometric operation moves into the image
_BINS = 30  # of magnitudes
_ORDERS = tuple(permutations(range(4)))

Matrix = tuple[float, float, float, float, float, float]


@dataclass(frozen=True)
class ColorFunctions(Generic[T]):
    """How a library changes an image."""

    width: Callable[[T], int]
    brightness: Callable[[T, float], T]  # by a factor, as the next three: 1 leaves the image as it is
    contrast: Callable[[T, float], T]
    saturation: Callable[[T, float], T]
    sharpness: Callable[[T, float], T]
    hue: Callable[[T, float], T]  # turned by a part of its circle
    affine: Callable[[T, Matrix], T]  # each pixel is taken from where the matrix finds it
    rotate: Callable[[T, float], T]  # by degrees
    posterize: Callable[[T, int], T]  # to a number of bits
    solarize: Callable[[T, int], T]  # pixel values at or above a threshold are inverted
    autocontrast: Callable[[T], T]
    equalize: Callable[[T], T]


@dataclass(frozen=True)
class Changes:
    """The numbers drawn for the images of a batch. Shapes: drawn (count, batch)."""

    options: TransformOptions
    drawn: NDArray[np.float64]

    def apply(self, image: T, row: int, functions: ColorFunctions[T]) -> T:
        """Return an image of the batch with its changes."""
        numbers = self.drawn[:, row].tolist()
        if any(self.options.color_jitter):
            image = jitter(image, self.options.color_jitter, numbers[:JITTERS], functions)
        magnitude = self.options.rand_augment_magnitude / _BINS
        for place in range(self.options.rand_augment):
            which, sign = numbers[JITTERS + 2 * place : JITTERS + 2 * place + 2]
            operation = OPERATIONS[int(which * len(OPERATIONS))]
            image = operation(functions, image, -magnitude if sign < 0.5 else magnitude)
        return image


def draw(key: int, samples: NDArray[np.int64], options: TransformOptions) -> Changes | None:
    """Draw the changes of samples; None if there are to be none."""
    if not any(options.color_jitter) and not options.rand_augment:
        return None
    return Changes(options, draws.changes(key, samples, JITTERS + 2 * options.rand_augment))


def jitter(image: T, strengths: Sequence[float], numbers: Sequence[float], functions: ColorFunctions[T]) -> T:
    """Change brightness, contrast, saturation and hue, in a random order, as torchvision's ColorJitter does."""
    kinds = (functions.brightness, functions.contrast, functions.saturation, functions.hue)
    for kind in _ORDERS[int(numbers[4] * len(_ORDERS))]:
        if strengths[kind]:
            amount = (2 * numbers[kind] - 1) * strengths[kind]
            image = kinds[kind](image, amount if kinds[kind] is functions.hue else 1 + amount)
    return image


def _shift(functions: ColorFunctions[Any], image: Any, amount: float) -> float:
    return amount * (150 / 331) * functions.width(image)


# Source: Cubuk et al., "RandAugment", 2020; the ranges are those of torchvision. Amounts are from -1 to 1.
OPERATIONS: tuple[Callable[[ColorFunctions[Any], Any, float], Any], ...] = (
    lambda functions, image, amount: image,
    lambda functions, image, amount: functions.affine(image, (1, 0.3 * amount, 0, 0, 1, 0)),
    lambda functions, image, amount: functions.affine(image, (1, 0, 0, 0.3 * amount, 1, 0)),
    lambda functions, image, amount: functions.affine(image, (1, 0, _shift(functions, image, amount), 0, 1, 0)),
    lambda functions, image, amount: functions.affine(image, (1, 0, 0, 0, 1, _shift(functions, image, amount))),
    lambda functions, image, amount: functions.rotate(image, 30 * amount),
    lambda functions, image, amount: functions.brightness(image, 1 + 0.9 * amount),
    lambda functions, image, amount: functions.saturation(image, 1 + 0.9 * amount),
    lambda functions, image, amount: functions.contrast(image, 1 + 0.9 * amount),
    lambda functions, image, amount: functions.sharpness(image, 1 + 0.9 * amount),
    lambda functions, image, amount: functions.posterize(image, 8 - round(4 * abs(amount))),
    lambda functions, image, amount: functions.solarize(image, round(255 * (1 - abs(amount)))),
    lambda functions, image, amount: functions.autocontrast(image),
    lambda functions, image, amount: functions.equalize(image),
)
