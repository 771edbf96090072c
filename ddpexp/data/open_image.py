"""Opening images in the usual formats by their content, whatever the name of the file.

Pillow reads some forty more, and one of them, PostScript, by running the file in Ghostscript.
"""

from __future__ import annotations

import os
from io import BytesIO
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError

from ddpexp.system.files import open_regular

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
CALLED = "JPEG, PNG, WebP, BMP, GIF, TIFF or PNM"


def open_image(file: str | os.PathLike[str] | BinaryIO) -> Image.Image:
    """Open an image as `PIL.Image.open` does, and nothing but what is of one of `FORMATS`.

    Raises:
        UnidentifiedImageError: The file is none of these. OSError: It cannot be read. Pillow's decoders raise errors of
            other kinds where a file is damaged.
    """
    if isinstance(file, str | os.PathLike):
        with open_regular(file) as opened:
            file = BytesIO(opened.read())
    try:
        return Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        raise UnidentifiedImageError(f"it is no {CALLED} image") from None
