"""Preparing CIFAR-10; the rules are those of `ddpexp.data.published`.

Standard library only but for what decodes or draws, and fast to import: the launching command imports this module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from ddpexp.data.cifar10 import archive
from ddpexp.data.cifar10.archive import SHAPE
from ddpexp.data.cifar10.classes import CLASSES, KINDS
from ddpexp.data.mirrors import AUTO_PATIENCE, DOWNLOAD_PATIENCE, Patience
from ddpexp.data.published import LabeledImages, Published, StandIn
from ddpexp.settings.key import Key

MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training pictures, as fractions of 255
EMBEDDED_VERSION = 1  # increase it when synthetic.py changes: it is part of the name of caches
EMBEDDED_MOST = 200_000  # pictures per part: they are drawn in memory
_MOMENTS_OF = 5000  # pictures whose patches are counted
_PATCH = 2  # its side


def prepare(
    root: str | None,
    source: Literal["auto", "files", "download", "embedded"],
    flip: bool = False,
    alternate: bool = False,
    crop: Annotated[int, Key(at_least=0, at_most=SHAPE[1] - 1)] = 0,
    reflect: bool = False,
    embedded_train: Annotated[int, Key(at_least=1, at_most=EMBEDDED_MOST)] = 50_000,
    embedded_test: Annotated[int, Key(at_least=1, at_most=EMBEDDED_MOST)] = 10_000,
    *,
    mirrors: Sequence[str] = MIRRORS,
    patience: Patience | None = None,
) -> dict[str, Any]:
    """Make sure that a decoded cache exists; return a description of the data.

    The description is that of `Published.prepare`, with the augmentation and a fact `patch_moments` (see there).
    """
    found = _cifar10().prepare(root, source, (embedded_train, embedded_test), mirrors, patience)
    return {**found, "flip": flip, "alternate": alternate, "crop": crop, "reflect": reflect}


def _cifar10() -> Published:
    return Published(
        name="cifar10",
        title="CIFAR-10",
        files=(archive.ARCHIVE,),
        sha256=archive.ARCHIVE.sha256,
        unpack=archive.unpack,
        shape=SHAPE,
        mean=MEAN,
        std=STD,
        classes=CLASSES,
        stand_in=StandIn("embedded-pictures", "drawn pictures", f"embedded-cifar10-v{EMBEDDED_VERSION}", KINDS, _draw),
        space="about 400 MB",
        patience=(replace(AUTO_PATIENCE, total=900.0), replace(DOWNLOAD_PATIENCE, total=3600.0)),
        patch_moments=patch_moments,
    )


def _draw(number: int, seed: int) -> tuple[LabeledImages, Sequence[str]]:
    from ddpexp.data.cifar10 import synthetic  # late: it imports numpy, which the command does not need otherwise

    images, labels = (array.tobytes() for array in synthetic.draw(number, seed))
    return LabeledImages(images, labels), [hashlib.sha256(content).hexdigest() for content in (images, labels)]


def patch_moments(pixels: bytes | memoryview) -> list[list[float]]:
    """Return the mean products of the values of a patch of 2 x 2, over the first 5,000 normalized pictures.

    Sums of products of bytes are exact, so the result is the same on every machine. Shapes: (12, 12), in the order of a
    convolution's weights: channel, row, column.
    """
    import numpy as np  # late: the command does not need it otherwise

    pictures = np.frombuffer(pixels, np.uint8).reshape(-1, *SHAPE)[:_MOMENTS_OF]
    width = SHAPE[1] - _PATCH + 1
    columns = [
        pictures[:, channel, top : top + width, left : left + width].reshape(-1)
        for channel in range(SHAPE[0])
        for top in range(_PATCH)
        for left in range(_PATCH)
    ]
    patches = np.stack(columns).astype(np.float64)  # whole numbers, whose sums of products stay below 2 ** 53
    num = patches.shape[1]
    products, means = patches @ patches.T / num, patches.sum(1) / num
    shift, scale = (np.repeat(np.array(values), _PATCH**2) for values in (MEAN, STD))
    mixed = np.outer(means, shift) / 255
    normalized = (products / 255**2 - mixed - mixed.T + np.outer(shift, shift)) / np.outer(scale, scale)
    return [[round(float(value), 6) for value in row] for row in normalized]
