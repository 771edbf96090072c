"""Changes of colors of one image by torch, on any device: what `host_colors` does by Pillow.

An image is a tensor of whole numbers from 0 to 255, float32, of shape (channels, height, width). Sums are of integers,
so that no result depends on how many threads or blocks add them up. Nothing here waits for the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddpexp.data.image_folder.colors import GREY, ColorFunctions, Matrix

_RED, _GREEN, _BLUE, _HALF, _BITS = 19595, 38470, 7471, 1 << 15, 16  # of brightness. Source: ITU-R BT.601, in 16 bits


def _blend(base: Tensor | float, image: Tensor, share: float) -> Tensor:
    blended: Tensor = (base + (image - base) * share).clamp(0, 255).floor()
    return blended


def _grey(image: Tensor) -> Tensor:
    """Return the brightness of an image. Shapes: (1, height, width)."""
    if len(image) == 1:
        return image
    red, green, blue = image.int()
    grey: Tensor = (red * _RED + green * _GREEN + blue * _BLUE + _HALF) >> _BITS
    return grey.float()[None]


def _contrast(image: Tensor, share: float) -> Tensor:
    total, number = _grey(image).long().sum(), image[0].numel()
    return _blend(((2 * total + number) // (2 * number)).float(), image, share)  # the mean, rounded


def _saturation(image: Tensor, share: float) -> Tensor:
    return image if len(image) == 1 else _blend(_grey(image), image, share)


def _hue(image: Tensor, amount: float) -> Tensor:
    """Turn the hue by a part of its circle. Source: Smith, "Color gamut transform pairs", 1978."""
    if len(image) == 1:
        return image
    red, green, blue = image
    value, least = image.amax(0), image.amin(0)
    spread = value - least
    divisor = spread.clamp(min=1)
    sixth = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    sixth = (sixth + 6 * amount) % 6
    # The value, less the spread where the channel's own hue is more than a sixth of the circle away.
    channels = [(sixth + shift) % 6 for shift in (5, 3, 1)]
    turned = [value - spread * torch.minimum(place, 4 - place).clamp(0, 1) for place in channels]
    return torch.stack(turned).round()


def _affine(image: Tensor, matrix: Matrix) -> Tensor:
    """Move each pixel to where the matrix finds it, the nearest one; what comes from outside is grey."""
    height, width = image.shape[1:]
    rows = torch.arange(height, device=image.device)[:, None] + 0.5
    columns = torch.arange(width, device=image.device)[None] + 0.5
    a, b, c, d, e, f = matrix
    left, top = (a * columns + b * rows + c).floor().long(), (d * columns + e * rows + f).floor().long()
    inside = (left >= 0) & (left < width) & (top >= 0) & (top < height)
    found = image[:, top.clamp(0, height - 1), left.clamp(0, width - 1)]
    return torch.where(inside, found, float(GREY))


def _rotated(image: Tensor, degrees: float) -> Tensor:
    angle = -math.radians(degrees)
    cos, sin = math.cos(angle), math.sin(angle)
    middle, center = image.shape[2] / 2, image.shape[1] / 2
    return _affine(
        image,
        (cos, sin, middle - cos * middle - sin * center, -sin, cos, center + sin * middle - cos * center),
    )


def _sharpness(image: Tensor, share: float) -> Tensor:
    """Blend with an image smoothed by a kernel of ones around a five; its frame stays as it is."""
    height, width = image.shape[1:]
    if min(height, width) < 3:
        return image
    around = image.int()
    total = 4 * around[:, 1:-1, 1:-1]
    for top in range(3):
        for left in range(3):
            total = total + around[:, top : top + height - 2, left : left + width - 2]
    inner = (2 * total + 13) // 26  # divided by 13, rounded
    frame = torch.ones_like(image[:1, 1:-1, 1:-1], dtype=torch.bool)
    smooth = torch.where(pad(frame, [1] * 4), pad(inner.float(), [1] * 4), image)
    return _blend(smooth, image, share)


def _posterized(image: Tensor, bits: int) -> Tensor:
    step = float(1 << 8 - bits)
    return (image / step).floor() * step


def _autocontrast(image: Tensor) -> Tensor:
    least, most = image.amin((1, 2), keepdim=True), image.amax((1, 2), keepdim=True)
    stretched = ((image - least) * 255 / (most - least).clamp(min=1)).floor()
    return torch.where(most > least, stretched, image)


def _equalized(image: Tensor) -> Tensor:
    """Make each brightness of each channel about equally frequent."""
    levels = torch.arange(256, device=image.device, dtype=image.dtype)
    channels = []
    for channel in image:
        below = torch.searchsorted(channel.flatten().sort().values, levels)  # pixels that are darker, for each level
        most = channel.amax().long()
        step = below.gather(0, most[None]) // 255
        table = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255).to(image.dtype)
        channels.append(torch.where(step > 0, table[channel.long()], channel))
    return torch.stack(channels)


DEVICE: ColorFunctions[Tensor] = ColorFunctions(
    width=lambda image: image.shape[2],
    brightness=lambda image, share: _blend(0.0, image, share),
    contrast=_contrast,
    saturation=_saturation,
    sharpness=_sharpness,
    hue=_hue,
    affine=_affine,
    rotate=_rotated,
    posterize=_posterized,
    solarize=lambda image, level: torch.where(image < level, image, 255 - image),
    autocontrast=_autocontrast,
    equalize=_equalized,
)
