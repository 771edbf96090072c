"""Pictures of every usual kind as bytes: of PIL, numpy or torch, with their channels first or last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpexp.errors import DdpexpError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CHANNELS = (1, 3, 4)  # grey, RGB, RGB with transparency
_PLAIN = {"P": "RGB", "CMYK": "RGB", "YCbCr": "RGB", "HSV": "RGB", "LAB": "RGB", "LA": "RGBA", "PA": "RGBA"}  # of PIL
_ROUNDING = 1e-3  # beyond 0 and 1, of floats


def pixels_of(picture: Any, where: str) -> NDArray[np.uint8]:
    """Return the pixels of a picture: of PIL, an array or a tensor; `where` names who got it, for messages.

    Floats are fractions of 255. Channels may stand first or last; where both can be meant, a tensor has them first, as
    torch's layers do, and an array last.

    Shapes: (height, width) or with 1, 3 or 4 channels; the result is (height, width, channels).

    Raises:
        DdpexpError: it is no picture, or of another shape or range.
    """
    import numpy as np  # late, and torch is not needed: the command imports this module

    is_tensor = hasattr(picture, "detach")
    if is_tensor:
        given = picture.detach().cpu()
        array = np.asarray((given.float() if given.is_floating_point() else given).numpy())
    elif isinstance(picture, np.ndarray):
        array = picture
    elif hasattr(picture, "getbands") and hasattr(picture, "convert"):  # of PIL
        array = np.asarray(picture.convert(_PLAIN[picture.mode]) if picture.mode in _PLAIN else picture)
    else:
        raise DdpexpError(
            f"The picture is {_article(type(picture).__name__)}, which is of no kind that can be shown",
            suggestion="Give a picture of PIL, an array of numpy or a tensor.",
            place=where,
        )
    return _bytes(_channels_last(array, where, first=is_tensor), where)


def _channels_last(array: NDArray[Any], where: str, first: bool) -> NDArray[Any]:
    """Return an array as (height, width, channels). Raises: DdpexpError."""
    if array.ndim == 2 and array.size:
        return array[:, :, None]
    may_be_first, may_be_last = (array.ndim == 3 and array.shape[end] in CHANNELS for end in (0, -1))
    if not array.size or not (may_be_first or may_be_last):
        batch = " It holds several pictures: give them one by one." if array.ndim == 4 else ""
        raise DdpexpError(
            f"The picture is {_described(array)}, which is the shape of none",
            suggestion=f"Give (height, width, 3), (3, height, width) or (height, width).{batch}",
            place=where,
        )
    return array.transpose(1, 2, 0) if may_be_first and (first or not may_be_last) else array


def rgb_of(picture: Any, where: str) -> NDArray[np.uint8]:
    """Return a picture as RGB, on white where it is transparent. Shapes: as in `pixels_of` to (height, width, 3)."""
    import numpy as np

    pixels = pixels_of(picture, where)
    if pixels.shape[2] == 4:
        opaque = pixels[:, :, 3:] / 255
        pixels = (pixels[:, :, :3] * opaque + 255 * (1 - opaque)).round().astype(np.uint8)
    rgb: NDArray[np.uint8] = np.require(
        pixels if pixels.shape[2] == 3 else pixels.repeat(3, axis=2), requirements=["C", "W"]
    )
    return rgb


def _bytes(array: NDArray[Any], where: str) -> NDArray[np.uint8]:
    """Return pixels as bytes. Raises: DdpexpError."""
    import numpy as np

    if array.dtype == np.uint8:
        return array
    if array.dtype.kind == "b":
        array = array.astype(np.float32)
    if array.dtype.kind not in "fiu":
        raise DdpexpError(
            f"The picture is {_described(array)}", suggestion="Give bytes, or floats from 0 to 1.", place=where
        )
    low, high = float(array.min()), float(array.max())
    most, slack = (1.0, _ROUNDING) if array.dtype.kind == "f" else (255.0, 0.0)
    if not (low >= -slack and high <= most + slack):
        advice = "Divide it by 255." if low >= 0 and high <= 255 else "Undo a normalization first."
        raise DdpexpError(
            f"The picture is {_described(array)} with values from {low:g} to {high:g}",
            suggestion=f"Give bytes, or floats from 0 to 1. {advice}",
            place=where,
        )
    pixels: NDArray[np.uint8] = (array.clip(0, most) * (255 / most)).round().astype(np.uint8)
    return pixels


def _described(array: NDArray[Any]) -> str:
    return f"{array.dtype} of shape ({', '.join(map(str, array.shape))})"


def _article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
