"""Changes of colors of one image by Pillow, on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps

from ddpexp.data.image_folder.colors import GREY, Changes, ColorFunctions, Matrix


def changed(pixels: NDArray[np.uint8], changes: Changes, row: int) -> NDArray[np.uint8]:
    """Return an image of a batch with its changes. Shapes: (size, size, channels)."""
    image = changes.apply(to_pillow(pixels), row, HOST)
    return np.asarray(image).reshape(pixels.shape)


def to_pillow(pixels: NDArray[np.uint8]) -> Image.Image:
    """Return pixels as an image. Shapes: (height, width, channels)."""
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else np.ascontiguousarray(pixels))


def _enhance(kind: Callable[[Image.Image], Any]) -> Callable[[Image.Image, float], Image.Image]:
    return lambda image, factor: kind(image).enhance(factor)


def _hue(image: Image.Image, amount: float) -> Image.Image:
    if image.mode == "L":
        return image
    hue, saturation, value = image.convert("HSV").split()
    turned = hue.point([(number + round(amount * 255)) % 256 for number in range(256)])
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")


def _fill(image: Image.Image) -> int | tuple[int, ...]:
    return GREY if image.mode == "L" else (GREY,) * 3


def _affine(image: Image.Image, matrix: Matrix) -> Image.Image:
    nearest, fill = Image.Resampling.NEAREST, _fill(image)
    return image.transform(image.size, Image.Transform.AFFINE, matrix, nearest, fillcolor=fill)


HOST: ColorFunctions[Image.Image] = ColorFunctions(
    width=lambda image: image.width,
    brightness=_enhance(ImageEnhance.Brightness),
    contrast=_enhance(ImageEnhance.Contrast),
    saturation=_enhance(ImageEnhance.Color),
    sharpness=_enhance(ImageEnhance.Sharpness),
    hue=_hue,
    affine=_affine,
    rotate=lambda image, degrees: image.rotate(degrees, Image.Resampling.NEAREST, fillcolor=_fill(image)),
    posterize=ImageOps.posterize,
    solarize=ImageOps.solarize,
    autocontrast=ImageOps.autocontrast,
    equalize=ImageOps.equalize,
)
