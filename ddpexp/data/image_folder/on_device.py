"""Images of training of which the host reads only what is cut out: the device resizes, flips and changes them.

Each image is computed by itself, so that it is the same in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpexp.compat import operators
from ddpexp.data.base import IndexData
from ddpexp.data.image_folder import colors
from ddpexp.data.image_folder.device_colors import DEVICE
from ddpexp.data.image_folder.images import ImageFolder, drawn, empty
from ddpexp.distributed.transfers import is_host, moved


@dataclass(frozen=True)
class FetchedCuts:
    """What was cut out of the images of a batch, on the host, with the changes that were drawn for them.

    Shapes: pixels (bytes,) uint8, one cut after the other; boxes (batch, 4); flipped (batch,); labels (batch,) int64.
    """

    pixels: Tensor
    boxes: NDArray[np.int64]
    flipped: NDArray[np.bool_]
    changes: colors.Changes | None
    labels: Tensor


@dataclass(frozen=True)
class AugmentedOnDevice(IndexData):
    """The images of one epoch of training; `data.augment_on=device`."""

    images: ImageFolder
    key: int
    size: int  # pixels

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def fetch(self, indices: Tensor, pinned: bool = False) -> FetchedCuts:
        """Cut out on the host, in several threads; may run in any thread."""
        images, samples = self.images, indices.numpy()
        boxes, flipped, changes = drawn(self.key, samples, images)
        ends = (boxes[:, 2] * boxes[:, 3] * images.options.channels).cumsum().tolist()
        shape = (ends[-1] if ends else 0,)
        out = torch.empty(shape, dtype=torch.uint8, pin_memory=True) if pinned else empty(shape, torch.uint8)
        pixels, numbers, places = out.numpy(), samples.tolist(), boxes.tolist()

        def cut(row: int) -> None:
            top, left, height, width = places[row]
            window = images.store.image(numbers[row])[top : top + height, left : left + width]
            pixels[ends[row] - window.size : ends[row]].reshape(window.shape)[:] = window

        images.in_threads(cut, len(samples))
        return FetchedCuts(out, boxes, flipped, changes, torch.from_numpy(images.labels[samples]))

    def stage(self, batch: FetchedCuts, device: torch.device) -> tuple[Tensor, Tensor]:
        """Move the cuts to the device as bytes; resize, flip, change and normalize them there."""
        options, pixels = self.images.options, moved(batch.pixels, device)
        shape = len(batch.boxes), options.channels, self.size, self.size
        images = empty(shape, torch.float32) if is_host(device) else torch.empty(shape, device=device)
        begin = 0
        for row, (_, _, height, width) in enumerate(batch.boxes.tolist()):
            end = begin + height * width * options.channels
            self._resize(pixels[begin:end].view(height, width, options.channels), images[row : row + 1])
            begin = end
        images.round_().clamp_(0, 255)
        if batch.flipped.any():
            rows = moved(torch.from_numpy(np.flatnonzero(batch.flipped)), device)
            images.index_copy_(0, rows, images.index_select(0, rows).flip(3))
        if batch.changes is not None:
            for row, image in enumerate(images):
                image.copy_(batch.changes.apply(image, row, DEVICE))
        return self.images.normalized(images), moved(batch.labels, device)

    def _resize(self, cut: Tensor, out: Tensor) -> None:
        """Resize a cut: in one launch for its conversion and one more, as each has a size of its own.

        Shapes: (height, width, channels) to (1, channels, size, size).
        """
        planes = cut.permute(2, 0, 1)[None]
        if planes.shape == out.shape:
            out.copy_(planes)
        else:
            operators.upsample_bilinear2d_aa.out(planes.float(), out.shape[2:], False, out=out)
