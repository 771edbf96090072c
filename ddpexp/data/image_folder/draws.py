"""The random changes of training images, as pure functions of a key (of seed and epoch) and of the sample."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from ddpexp.data import order
from ddpexp.data.order import STRIDE, mix

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_TRIES = 10
_CROP, _FLIP, _CHANGES, _MIX = (np.uint64(number << 32) for number in range(4))  # streams of a sample


def crops(
    key: int, samples: Integers, shapes: Integers, scale: tuple[float, ...], ratio: tuple[float, ...]
) -> Integers:
    """Draw a random resized crop of each image: top, left, height, width.

    Shapes: samples (n,); shapes (n, 2), height and width; the result (n, 4).
    Source: Szegedy et al., "Going deeper with convolutions", 2015; the tries are those of torchvision.
    """
    drawn = uniforms(key, samples, _CROP, 2 * _TRIES + 2)
    heights, widths = shapes[:, 0].astype(np.float64), shapes[:, 1].astype(np.float64)
    area = heights * widths * (scale[0] + drawn[:_TRIES] * (scale[1] - scale[0]))
    low, high = np.log(ratio[0]), np.log(ratio[1])
    aspect = np.exp(low + drawn[_TRIES : 2 * _TRIES] * (high - low))
    tall, wide = np.rint(np.sqrt(area / aspect)), np.rint(np.sqrt(area * aspect))
    fits = (tall >= 1) & (wide >= 1) & (tall <= heights) & (wide <= widths)
    first, column = fits.argmax(0), np.arange(len(samples))
    # Where none fits: the largest crop whose ratio is in the range, in the middle.
    middle_wide = np.minimum(widths, np.rint(heights * ratio[1]).clip(1))
    middle_tall = np.minimum(heights, np.rint(widths / ratio[0]).clip(1))
    some = fits.any(0)
    height = np.where(some, tall[first, column], middle_tall)
    width = np.where(some, wide[first, column], middle_wide)
    place = np.where(some, drawn[2 * _TRIES :], 0.5)
    top, left = np.floor(place[0] * (heights - height + 1)), np.floor(place[1] * (widths - width + 1))
    return np.stack([top, left, height, width], axis=1).astype(np.int64)


def center_crops(shapes: Integers, size: int, eval_size: int) -> Integers:
    """Return the box that is `size` x `size` in the middle once the shortest side is `eval_size`.

    Shapes: as in `crops`.
    """
    side = np.maximum(1, np.rint(shapes.min(1) * (size / eval_size))).astype(np.int64)
    corner = (shapes - side[:, None]) // 2
    return np.concatenate([corner, side[:, None], side[:, None]], axis=1)


def flips(key: int, samples: Integers) -> NDArray[np.bool_]:
    """Draw which images are flipped. Shapes: (n,)."""
    chosen: NDArray[np.bool_] = uniforms(key, samples, _FLIP, 1)[0] < 0.5
    return chosen


def changes(key: int, samples: Integers, count: int) -> Floats:
    """Draw numbers from 0 to 1 for the changes of colors and RandAugment. Shapes: (count, n)."""
    return uniforms(key, samples, _CHANGES, count)


def mixes(key: int, samples: Integers, mixup: float, cutmix: float, size: int) -> tuple[Floats, Integers]:
    """Draw how each image is mixed with its partner: its own share, and the box that is the partner's.

    The box of CutMix has (1 - share) of the area; that of mixup is empty. With both, each image gets one of them.

    Shapes: samples (n,); the shares (n,); the boxes (n, 4): top, left, height, width.
    Source: Zhang et al., "mixup", 2018; Yun et al., "CutMix", 2019.
    """
    boxes = np.zeros((len(samples), 4), np.int64)
    shares = np.ones(len(samples))
    for row, sample in enumerate(samples):
        drawn = uniforms(key, np.array([sample]), _MIX, 4)[:, 0].tolist()
        cuts = cutmix > 0 and (mixup == 0 or drawn[0] < 0.5)
        alpha = cutmix if cuts else mixup
        share = random.Random(drawn[3]).betavariate(alpha, alpha)
        if cuts:
            side = round(size * (1 - share) ** 0.5)
            top, left = (int(value * (size - side + 1)) for value in drawn[1:3])
            boxes[row] = top, left, side, side
            share = 1 - side * side / size**2
        shares[row] = share
    return shares, boxes


def uniforms(key: int, samples: Integers, stream: np.uint64, count: int) -> Floats:
    """Draw `count` numbers in [0, 1) for each sample. Shapes: samples (n,), the result (count, n)."""
    words = mix(np.uint64(key) + samples.astype(np.uint64) * STRIDE)
    steps = (stream + np.arange(count, dtype=np.uint64)) * STRIDE
    return order.uniforms(mix(words[None] + steps[:, None]))
