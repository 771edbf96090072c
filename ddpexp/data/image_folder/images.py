"""Batches of images, cut out of a cache by several threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional

from ddpexp.data.base import IndexData, SampleNames
from ddpexp.data.image_folder import colors, draws
from ddpexp.data.image_folder.host_colors import changed, to_pillow
from ddpexp.data.image_folder.options import TransformOptions
from ddpexp.data.image_folder.stores import Images, Pixels
from ddpexp.data.images.dataset import Scales, normalize, scales_of
from ddpexp.distributed.transfers import is_host, moved

_TASKS = 4  # pieces of a batch for each thread, so that none waits long for the last


_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Drawn:
    """How the images of a batch are cut out, flipped and changed.

    Shapes: boxes (batch, 4): top, left, height, width; flipped (batch,).
    """

    boxes: NDArray[np.int64]
    flipped: NDArray[np.bool_]
    changes: colors.Changes | None


@dataclass(frozen=True)
class Fetched:
    """A batch on the host, before normalization.

    Shapes: pixels (batch, size, size, channels) uint8; labels (batch,) int64.
    """

    pixels: Tensor
    labels: Tensor


@dataclass(frozen=True)
class ImageFolder(IndexData):
    """The images of a part, resized and cut from the middle, as in evaluation."""

    store: Images
    labels: NDArray[np.int64]
    options: TransformOptions
    num_classes: int

    fetches_ahead = True

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """Return an image as it is stored, for transforms of the user, and its label."""
        pixels = self.store.image(index)
        return to_pillow(pixels), int(self.labels[index])

    @property
    def sample_names(self) -> SampleNames:
        """Return the path of each image below data.root."""
        return SampleNames("file", [self.store.name(index) for index in range(len(self))])

    def fetch(self, indices: Tensor, pinned: bool = False) -> Fetched:
        """Make a batch as in evaluation on the host; may run in any thread."""
        samples = indices.numpy()
        boxes = draws.center_crops(self.store.shapes(samples), self.options.size, self._eval_size)
        unchanged = Drawn(boxes, np.zeros(len(samples), bool), None)
        return self.fetch_drawn(samples, unchanged, pinned, self.options.size)

    def stage(self, batch: Fetched, device: torch.device) -> tuple[Tensor, Tensor]:
        """Move a batch to the device as bytes, and normalize it there.

        Shapes: as in `ddpexp.data.image_folder.dataset.load`.
        """
        pixels = moved(batch.pixels, device).permute(0, 3, 1, 2)
        images = empty(tuple(pixels.shape), torch.float32, device)
        images.copy_(pixels)
        return self.normalized(images), moved(batch.labels, device)

    def normalized(self, images: Tensor) -> Tensor:
        """Normalize images as configured. Shapes: as in `normalize`."""
        return normalize(images, self._scales)

    @property
    def _eval_size(self) -> int:
        assert self.options.eval_size != "auto", "resolved in preparation"
        return self.options.eval_size

    @cached_property
    def _scales(self) -> Scales:
        return scales_of(self.options.mean, self.options.std)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor | None:
        number = torch.get_num_threads()
        return ThreadPoolExecutor(number, "ddpexp-images") if number > 1 else None

    def fetch_drawn(self, samples: NDArray[np.int64], drawn: Drawn, pinned: bool, size: int) -> Fetched:
        """Cut boxes out of samples, resize them to `size`, flip and change them, in several threads."""
        out = empty((len(samples), size, size, self.options.channels), torch.uint8, pinned=pinned)
        pixels = out.numpy()
        numbers = samples.tolist()
        boxes = drawn.boxes.tolist()

        def cut(row: int) -> None:
            image = _resized(self.store.image(numbers[row]), boxes[row], size)
            if drawn.flipped[row]:
                image = image.flip(1)
            pixels[row] = image.numpy() if drawn.changes is None else changed(image.numpy(), drawn.changes, row)

        self.in_threads(cut, len(samples))
        return Fetched(out, torch.from_numpy(self.labels[samples]))

    def in_threads(self, work: Callable[[int], None], number: int) -> None:
        """Call `work` with 0 to `number` - 1, in several threads."""

        def several(begin: int, end: int) -> None:
            for row in range(begin, end):
                work(row)

        if (threads := self._threads) is None or number == 1:
            several(0, number)
            return
        step = -(-number // (_TASKS * torch.get_num_threads()))
        begins = range(0, number, step)
        for _ in threads.map(several, begins, (min(begin + step, number) for begin in begins)):
            pass


@dataclass(frozen=True)
class Augmented(IndexData):
    """The images of one epoch of training."""

    images: ImageFolder
    key: int
    size: int  # pixels

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def fetch(self, indices: Tensor, pinned: bool = False) -> Fetched:
        """Make a batch of training on the host; may run in any thread."""
        samples = indices.numpy()
        return self.images.fetch_drawn(samples, draw(self.key, samples, self.images), pinned, self.size)

    def stage(self, batch: Fetched, device: torch.device) -> tuple[Tensor, Tensor]:
        """Move a batch to the device, and normalize it there."""
        return self.images.stage(batch, device)


def draw(key: int, samples: NDArray[np.int64], images: ImageFolder) -> Drawn:
    """Draw how images of training are cut out, flipped and changed."""
    options = images.options
    boxes = draws.crops(key, samples, images.store.shapes(samples), options.scale, options.ratio)
    flipped = draws.flips(key, samples) if options.flip else np.zeros(len(samples), bool)
    return Drawn(boxes, flipped, colors.draw(key, samples, options))


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = _HOST, pinned: bool = False) -> Tensor:
    """Return new memory, which numpy maps in huge pages on the host: new small ones take as long as a whole batch."""
    if pinned or not is_host(device):
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
    return torch.from_numpy(np.empty(shape, {torch.uint8: np.uint8, torch.float32: np.float32}[dtype]))


def _resized(image: Pixels, box: list[int], size: int) -> Tensor:
    """Cut a box out of an image and resize it. Shapes: (height, width, channels) to (size, size, channels)."""
    top, left, height, width = box
    # A copy in one piece is both writable, which torch wants, and faster to resize.
    cut = torch.from_numpy(np.array(image[top : top + height, left : left + width]))
    if (height, width) == (size, size):
        return cut
    planes = cut[None].permute(0, 3, 1, 2)  # in this sequence torch sees that channels are last, and keeps that
    # torch's kernel for bytes is 3 to 5 times as fast as Pillow's.
    resized = functional.interpolate(planes, (size, size), mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0)
