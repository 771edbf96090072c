"""Images of one size that fit into memory, mapped once for all workers of a node, flipped and cropped batch by batch.

Augmentation is a function of seed, epoch and sample: the same at every number of workers and after any interruption.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from ddpexp.data.base import IndexData
from ddpexp.data.datasets import Splits, map_npy
from ddpexp.data.order import STRIDE, mix
from ddpexp.distributed.rng import AUGMENT, seed_of
from ddpexp.distributed.transfers import moved, rows


def load(prepared: Mapping[str, Any]) -> Splits:
    """Map the files that `ddpexp.data.images.files.prepare` has checked, or `ddpexp.data.published` has decoded.

    Shapes: a batch is images (batch, channels, height, width) float32, normalised, and labels (batch,) int64.
    """
    folder = Path(prepared["folder"])
    norm = tuple(prepared["mean"]), tuple(prepared["std"])
    augment = {name: prepared[name] for name in ("flip", "alternate", "crop", "reflect") if name in prepared}
    train = Images(*_part(folder, "train"), *norm, **augment)
    return Splits(train=train, evals={"eval": Images(*_part(folder, "test"), *norm)})


@dataclass(frozen=True)
class Draws:
    """The augmentation of an epoch: a function of these and of the sample, not of its batch."""

    key: int  # of the crops
    flip_key: int
    inverted: bool  # flip the images that `flip_key` does not choose
    frame: int

    def of(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
        """Return whether each sample is flipped, and the top and left of its crop."""
        words = _words(self.key, samples)
        positions = np.uint64(2 * self.frame + 1)
        # 31 bits each, so that the product fits; positions differ in probability by less than 1e-8.
        top, left = (
            (words >> np.uint64(begin) & np.uint64(2**31 - 1)) * positions >> np.uint64(31) for begin in (1, 32)
        )
        chosen = words if self.flip_key == self.key else _words(self.flip_key, samples)
        return (chosen & np.uint64(1) != 0) != self.inverted, top.astype(np.int64), left.astype(np.int64)


def _words(key: int, samples: NDArray[np.int64]) -> NDArray[np.uint64]:
    return mix(np.uint64(key) + samples.astype(np.uint64) * STRIDE)


Scales = Sequence[tuple[Tensor, float]]
"""What is added to each channel, or to all, after it is multiplied by the second number."""


def scales_of(mean: Sequence[float], std: Sequence[float]) -> Scales:
    """Return how bytes are normalized by mean and standard deviation, which are fractions of 255."""
    return [(torch.tensor(-shift / scale), 1 / (255 * scale)) for shift, scale in zip(mean, std, strict=True)]


def normalize(images: Tensor, scales: Scales) -> Tensor:
    """Normalize images in place, and return them. Shapes: (batch, channels, height, width) float32, 0 to 255."""
    for channel, (shift, scale) in zip(images.unbind(1) if len(scales) > 1 else [images], scales, strict=True):
        torch.add(shift, channel, alpha=scale, out=channel)  # one pass instead of two
    return images


@dataclass(frozen=True)
class Images(IndexData):
    """Images as stored, and how they are processed into batches; `flip` and `crop` apply only to training.

    Shapes: pixels (num_samples, channels, height, width) uint8; labels (num_samples,) int64.
    Units: `mean` and `std` of each channel, or one for all, as fractions of 255; `crop` pixels.
    """

    pixels: Tensor
    labels: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool = False  # flip half of the images horizontally
    crop: int = 0  # pad with black and crop to the same size at a random position
    alternate: bool = False  # draw the flips once, and flip the other images in every other epoch
    reflect: bool = False  # pad with reflections in place of black

    fetches_ahead = True
    is_faster_on_device = True  # a GPU flips and crops in less time

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def fetch(self, indices: Tensor, pinned: bool = False) -> tuple[Tensor, Tensor]:
        """Gather images and labels as stored; may run in any thread."""
        return rows(self.pixels, indices, pinned), rows(self.labels, indices, pinned)

    def of_epoch(self, seed: int, epoch: int) -> IndexData:
        """Return these images with the augmentation of one epoch."""
        return _Augmented(self, self.draws_of_epoch(seed, epoch)) if self.flip or self.crop else self

    def draws_of_epoch(self, seed: int, epoch: int) -> Draws:
        """Return how the augmentation of an epoch is drawn."""
        key = seed_of(seed, AUGMENT, epoch, 0)
        if not self.alternate:
            return Draws(key, key, False, self.crop)
        return Draws(key, seed_of(seed, AUGMENT, 0, 0), epoch % 2 == 1, self.crop)

    @property
    def num_bytes(self) -> int:
        """Return the size of pixels and labels."""
        return sum(tensor.nbytes for tensor in (self.pixels, self.labels))

    def to(self, device: torch.device) -> IndexData:
        """Return these images in the memory of the device, where they are also augmented."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return _OnDevice(**{**values, "pixels": self.pixels.to(device), "labels": self.labels.to(device)})

    def stage(self, batch: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
        """Move pixels as bytes to the device, and normalise them there. Shapes: as in `load`."""
        labels, images = moved(batch[1], device), moved(batch[0], device).float()
        return normalize(images, self._scales), labels

    @cached_property
    def _scales(self) -> Scales:
        return scales_of(self.mean, self.std)


@dataclass(frozen=True)
class _OnDevice(Images):
    """Images in the memory of a device."""

    def of_epoch(self, seed: int, epoch: int) -> IndexData:
        """Draw for all images of the epoch at once, so that batches do not wait for the host."""
        if not self.flip and not self.crop:
            return self
        drawn = self.draws_of_epoch(seed, epoch).of(np.arange(len(self)))
        return _AugmentedOnDevice(self, *(moved(torch.from_numpy(values), self.pixels.device) for values in drawn))


@dataclass(frozen=True)
class _AugmentedOnDevice(IndexData):
    """The images of one epoch in the memory of a device. Shapes: flipped, top, left (num_samples,)."""

    images: Images
    flipped: Tensor
    top: Tensor
    left: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, indices: Tensor, pinned: bool = False) -> tuple[Tensor, Tensor]:
        pixels = self.images.pixels.index_select(0, indices)
        if self.images.flip:
            pixels = torch.where(self.flipped.index_select(0, indices).view(-1, 1, 1, 1), pixels.flip(-1), pixels)
        if self.images.crop:
            top, left = self.top.index_select(0, indices), self.left.index_select(0, indices)
            pixels = _windows(pixels, self.images.crop, self.images.reflect)[
                torch.arange(len(pixels), device=pixels.device), :, top, left
            ]
        return pixels, rows(self.images.labels, indices, pinned=False)

    def stage(self, batch: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
        return self.images.stage(batch, device)


@dataclass(frozen=True)
class _Augmented(IndexData):
    """The images of one epoch."""

    images: Images
    draws: Draws

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, indices: Tensor, pinned: bool = False) -> tuple[Tensor, Tensor]:
        # A crop copies once more, so only what is not cropped is gathered straight into pinned memory.
        pixels = rows(self.images.pixels, indices, pinned and not self.images.crop)
        flipped, top, left = self.draws.of(indices.numpy())
        if self.images.flip:
            _hflip(pixels, np.flatnonzero(flipped))
        if self.images.crop:
            # numpy's gather is faster than torch's on a CPU.
            cut = _windows(pixels, self.images.crop, self.images.reflect).numpy()[np.arange(len(pixels)), :, top, left]
            pixels = torch.from_numpy(cut).pin_memory() if pinned else torch.from_numpy(cut)
        return pixels, rows(self.images.labels, indices, pinned)

    def stage(self, batch: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
        return self.images.stage(batch, device)


def _hflip(pixels: Tensor, chosen: NDArray[np.int64]) -> None:
    """Flip the chosen images of a batch horizontally, in place."""
    pixels.numpy()[chosen] = pixels.index_select(0, torch.from_numpy(chosen)).flip(-1).numpy()


def _windows(pixels: Tensor, frame: int, reflect: bool) -> Tensor:
    """Return all crops of padded images as a view. Shapes: (batch, channels, positions, positions, height, width)."""
    height, width = pixels.shape[-2:]
    if reflect:  # by hand: torch does not reflect bytes
        for dim, size in ((2, height), (3, width)):
            places = torch.arange(-frame, size + frame, device=pixels.device).abs()
            pixels = pixels.index_select(dim, torch.minimum(places, 2 * (size - 1) - places))
    else:
        pixels = pad(pixels, [frame] * 4)
    return pixels.unfold(2, height, 1).unfold(3, width, 1)


def _part(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    pixels, labels = (map_npy(folder / f"{part}-{what}.npy") for what in ("images", "labels"))
    return pixels if pixels.dim() == 4 else pixels.unsqueeze(1), labels.long()
