"""Images of training of which the host reads only what is cut out: the device resizes, flips and changes them.

Each image is computed by itself, so that it is the same in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddpexp.compat import operators
from ddpexp.data.base import IndexData
from ddpexp.data.image_folder.device_colors import DEVICE
from ddpexp.data.image_folder.images import Drawn, ImageFolder, draw, empty
from ddpexp.distributed.transfers import moved


@dataclass(frozen=True)
class FetchedCuts:
    """The cuts out of the images of a batch, on the host.

    Shapes: pixels (bytes,) uint8, one cut after the other; labels (batch,) int64.
    """

    pixels: Tensor
    drawn: Drawn
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
        drawn = draw(self.key, samples, images)
        ends = (drawn.boxes[:, 2] * drawn.boxes[:, 3] * images.options.channels).cumsum().tolist()
        out = empty((ends[-1] if ends else 0,), torch.uint8, pinned=pinned)
        pixels = out.numpy()
        numbers = samples.tolist()
        boxes = drawn.boxes.tolist()

        def cut(row: int) -> None:
            top, left, height, width = boxes[row]
            window = images.store.image(numbers[row])[top : top + height, left : left + width]
            pixels[ends[row] - window.size : ends[row]].reshape(window.shape)[:] = window

        images.in_threads(cut, len(samples))
        return FetchedCuts(out, drawn, torch.from_numpy(images.labels[samples]))

    def stage(self, batch: FetchedCuts, device: torch.device) -> tuple[Tensor, Tensor]:
        """Move the cuts to the device as bytes; resize, flip, change and normalize them there."""
        drawn = batch.drawn
        channels = self.images.options.channels
        pixels = moved(batch.pixels, device)
        images = empty((len(drawn.boxes), channels, self.size, self.size), torch.float32, device)
        begin = 0
        for row, (_, _, height, width) in enumerate(drawn.boxes.tolist()):
            end = begin + height * width * channels
            self._resize(pixels[begin:end].view(height, width, channels), images[row : row + 1])
            begin = end
        images.round_().clamp_(0, 255)
        if drawn.flipped.any():
            rows = moved(torch.from_numpy(np.flatnonzero(drawn.flipped)), device)
            images.index_copy_(0, rows, images.index_select(0, rows).flip(3))
        if drawn.changes is not None:
            for row, image in enumerate(images):
                image.copy_(drawn.changes.apply(image, row, DEVICE))
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
