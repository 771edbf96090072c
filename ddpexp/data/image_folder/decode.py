"""Decoding one image: upright, in grey or RGB, of limited size; the same wherever it is done.

A cache of pixels and one of files therefore give the same batches.
"""

from __future__ import annotations

import os
import warnings
from io import BytesIO
from typing import BinaryIO

from PIL import Image

from ddpexp.data.image_folder.options import StoredSize
from ddpexp.data.open_image import open_image
from ddpexp.system.files import open_regular

_ORIENTATION = 0x0112  # the tag. Source: Exif 2.3, table 4
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_TURNED = (5, 6, 7, 8)  # orientations that exchange width and height
_MODES = {1: "L", 3: "RGB"}


class BrokenImageError(Exception):
    """A file that is no image, or that ends too early; the text says why."""


def size_of(source: str | Image.Image, stored: StoredSize) -> tuple[int, int]:
    """Return height and width as decoded, of an opened image or from the header of a file; quick.

    Raises:
        BrokenImageError: it has none. OSError: it cannot be read.
    """
    if isinstance(source, Image.Image):
        return _target(source, _orientation(source), stored)
    with open_regular(source) as file, _opened(file) as image:
        return _target(image, _orientation(image), stored)


def decode(source: str | bytes, stored: StoredSize, channels: int) -> Image.Image:
    """Return an image, upright, in grey (1 channel) or RGB (3), as large as it is stored.

    Transparent parts become white.

    Raises:
        BrokenImageError: the file is damaged. OSError: it cannot be read.
    """
    if isinstance(source, str):
        with open_regular(source) as stream:
            source = stream.read()
    with _opened(BytesIO(source)) as image:
        return decoded(image, stored, channels)


def decoded(image: Image.Image, stored: StoredSize, channels: int) -> Image.Image:
    """Return an opened image as `decode` does. Raises: BrokenImageError."""
    orientation = _orientation(image)
    height, width = _target(image, orientation, stored)
    drawn = (height, width) if orientation in _TURNED else (width, height)
    try:
        if image.format == "JPEG":
            image.draft(image.mode, drawn)  # decodes at 1/2, 1/4 or 1/8 where that is large enough
        pixels = _plain(image, _MODES[channels])
    except Exception as error:  # decoders raise errors of many kinds
        raise BrokenImageError(_reason(error)) from None
    if pixels.size != drawn:
        pixels = pixels.resize(drawn, Image.Resampling.BILINEAR)
    turn = _UPRIGHT.get(orientation)
    return pixels if turn is None else pixels.transpose(turn)


def _opened(file: BinaryIO) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = open_image(file)
            if image.format == "TIFF" and _tag(image) in _TURNED:
                image.load()  # Pillow turns a TIFF itself, some of its versions only here
            return image
    except Exception as error:
        size = file.seek(0, os.SEEK_END)
        raise BrokenImageError("the file is empty" if size == 0 else _reason(error)) from None


def _orientation(image: Image.Image) -> int:
    return 1 if image.format == "TIFF" else _tag(image)  # Pillow turns a TIFF itself


def _tag(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged metadata of an image that is intact
        return 1


def _target(image: Image.Image, orientation: int, stored: StoredSize) -> tuple[int, int]:
    width, height = image.size if orientation not in _TURNED else image.size[::-1]
    shortest = min(width, height)
    if shortest < 1:
        raise BrokenImageError(f"it is {width} x {height} pixels")
    if shortest <= stored.largest:
        return height, width
    return max(1, round(height * stored.side / shortest)), max(1, round(width * stored.side / shortest))


def _plain(image: Image.Image, mode: str) -> Image.Image:
    """Convert any mode of Pillow to grey or RGB."""
    if image.mode == mode:
        image.load()
        return image
    if image.mode == "F" or (image.mode == "I" and image.format == "TIFF"):
        raise BrokenImageError(f"its pixels are of 32 bits (mode {image.mode}), and none says what is white")
    if image.mode.startswith("I"):  # 16 bits
        return image.convert("F").point(lambda value: value * (1 / 257)).convert("L").convert(mode)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert(mode)
    return image.convert("RGB").convert(mode) if image.mode in ("P", "CMYK", "YCbCr") else image.convert(mode)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
