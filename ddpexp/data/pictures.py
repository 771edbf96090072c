"""Pictures that a trained model is given: files, folders, and pictures of PIL, numpy and torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ddpexp.data.base import SampleNames
from ddpexp.data.image_folder.decode import BrokenImageError, decode, decoded, size_of
from ddpexp.data.image_folder.options import StoredSize
from ddpexp.data.image_folder.walk import SUFFIXES, Walk
from ddpexp.data.inputs import INPUT, array_of, as_path, listed, load_array, wrong_kind
from ddpexp.errors import DdpexpError, LoaderError, RefusedError
from ddpexp.system.pixels import CHANNELS, pixels_of

KINDS = "a picture: a file, a folder of such, or one of PIL, numpy or torch"
_ARRAYS = (".npy", ".npz")
_AS_IT_IS = StoredSize(1 << 30, 1 << 30)


@dataclass(frozen=True)
class Pictures:
    """Pictures in the order in which they are given: paths, and those in memory."""

    sources: Sequence[str | Image.Image]
    names: SampleNames | None
    is_one: bool

    def __len__(self) -> int:
        """Return their number."""
        return len(self.sources)

    def name(self, number: int) -> str:
        """Return what a message calls a picture."""
        source = self.sources[number]
        return source if isinstance(source, str) else f"picture {number}"

    def size(self, number: int, stored: StoredSize = _AS_IT_IS) -> tuple[int, int]:
        """Return height and width as decoded. Raises: RefusedError."""
        try:
            return size_of(self.sources[number], stored)
        except (BrokenImageError, OSError) as error:
            raise self._broken(number, error) from None

    def pixels(self, number: int, channels: int, stored: StoredSize = _AS_IT_IS) -> Image.Image:
        """Decode a picture as those of the data are. Raises: LoaderError."""
        source = self.sources[number]
        try:
            if isinstance(source, str):
                return decode(source, stored, channels)
            return decoded(source, stored, channels)
        except (BrokenImageError, OSError) as error:
            raise LoaderError(str(self._broken(number, error))) from None

    def _broken(self, number: int, error: Exception) -> RefusedError:
        is_named = Path(self.name(number)).suffix.lower() in SUFFIXES
        return RefusedError(
            f"cannot be read as a picture: {error}",
            place=self.name(number),
            suggestion="Remove or replace it." if is_named else f"The model was trained on pictures: give {KINDS}.",
        )


def pictures_of(given: Any, channels: int, size: tuple[int, int] | None = None) -> Pictures:
    """Return what is given as pictures; `channels` is the number of those that the model reads, and `size` their size.

    Raises:
        RefusedError: there is no such file, no picture in a folder, or something is no picture.
    """
    values, is_one = listed(given)
    sources: list[str | Image.Image] = []
    names: list[str] = []
    for value in values:
        if (path := as_path(value)) is None:
            found, several = _in_memory(value, channels, size)
        elif path.is_dir():
            found, several = _below(path), True
            names += [str(Path(str(one)).relative_to(path)) for one in found]
        elif path.suffix.lower() in _ARRAYS:
            found, several = _in_memory(load_array(path), channels, size)
        else:
            found, several = [str(path)], False
            names.append(str(value))
        sources += found
        is_one = is_one and not several
    if not sources:
        raise RefusedError("is empty: there is nothing to predict for", place=INPUT, suggestion=f"Give {KINDS}.")
    return Pictures(sources, SampleNames("file", names) if len(names) == len(sources) else None, is_one)


def _below(folder: Path) -> list[str | Image.Image]:
    walk = Walk(folder)
    walk.begin_part(folder.absolute().parent)
    found = [str(folder / image.path) for image in walk.images(folder, -1)]
    if not found:
        raise RefusedError(
            f"holds no pictures (names ending in {', '.join(SUFFIXES)})",
            place=str(folder),
            suggestion="Name a folder with some, or one picture.",
        )
    return [*found]


def _in_memory(value: Any, channels: int, size: tuple[int, int] | None) -> tuple[list[str | Image.Image], bool]:
    """Return a picture, or those of an array of several, and whether it is one of several."""
    if isinstance(value, Image.Image):
        return [value.copy()], False  # decoding a part of a file would change the picture itself
    array = array_of(value)
    if array is None:
        raise wrong_kind(value, KINDS)
    several = array.ndim == 4 or (array.ndim == 3 and channels == 1 and _are_grey(array.shape, size))
    parts = value if several else [value]
    return [_picture(part) for part in parts], several


def _are_grey(shape: tuple[int, ...], size: tuple[int, int] | None) -> bool:
    """Return whether an array of three dimensions holds several pictures in grey, and not one with its channels."""
    if size is not None:
        return shape[1:] == size and shape[0] != 1
    return {shape[0], shape[-1]}.isdisjoint(CHANNELS)


def _picture(value: Any) -> Image.Image:
    try:
        pixels: NDArray[np.uint8] = pixels_of(value, "the input")
    except DdpexpError as error:
        raise RefusedError(error.reason, suggestion=error.suggestion, place=error.place) from None
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
