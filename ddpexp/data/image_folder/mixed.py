"""Mixup and CutMix: each image is mixed with its partner, another one of the same global batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ddpexp.data.base import IndexData
from ddpexp.data.image_folder import draws
from ddpexp.data.image_folder.images import Augmented, Fetched
from ddpexp.data.image_folder.on_device import AugmentedOnDevice, FetchedCuts
from ddpexp.distributed.transfers import moved


@dataclass(frozen=True)
class FetchedPairs:
    """Images and their partners on the host. Shapes: rows, partners and shares (batch,), boxes (batch, 4)."""

    images: Fetched | FetchedCuts  # each sample once
    rows: Tensor
    partners: Tensor
    shares: Tensor
    boxes: list[list[int]]


@dataclass(frozen=True)
class Mixed(IndexData):
    """The images of one epoch of training, mixed; labels are probabilities."""

    augmented: Augmented | AugmentedOnDevice

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.augmented)

    @property
    def has_partners(self) -> bool:
        """Return that images are mixed with their partners."""
        return True

    def fetch(self, indices: Tensor, pinned: bool = False) -> FetchedPairs:
        """Make a batch in which each image is its own partner."""
        return self.fetch_pairs(indices, indices, pinned)

    def fetch_pairs(self, indices: Tensor, partners: Tensor, pinned: bool = False) -> FetchedPairs:
        """Make a batch on the host, each sample in it once; may run in any thread."""
        samples = indices.numpy()
        every, rows = np.unique(np.concatenate([samples, partners.numpy()]), return_inverse=True)
        options = self.augmented.images.options
        shares, boxes = draws.mixes(self.augmented.key, samples, options.mixup, options.cutmix, self.augmented.size)
        own, other = np.split(rows.reshape(-1), 2)
        return FetchedPairs(
            self.augmented.fetch(torch.from_numpy(every), pinned),
            torch.from_numpy(own),
            torch.from_numpy(other),
            torch.from_numpy(shares).float(),
            boxes.tolist(),
        )

    def stage(self, batch: FetchedPairs, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mix images with their partners on the device, and return them with the probabilities of the classes.

        Shapes: (batch, channels, size, size) and (batch, classes), float32.
        """
        images, labels = self.augmented.stage(batch.images, device)  # type: ignore[arg-type]
        rows, partners, shares = (moved(part, device) for part in (batch.rows, batch.partners, batch.shares))
        classes = one_hot(labels, self.augmented.images.num_classes).float()
        cut = [place for place, box in enumerate(batch.boxes) if box[2]]
        mixed, others = images[rows], images[partners]
        weight = shares.clone()
        if cut:
            weight[moved(torch.tensor(cut), device)] = 1.0  # the pixels of these are exchanged, not mixed
        weight = weight.view(-1, 1, 1, 1)
        mixed.mul_(weight).addcmul_(others, 1 - weight)
        for place in cut:
            top, left, height, width = batch.boxes[place]
            window = slice(top, top + height), slice(left, left + width)
            mixed[place, :, window[0], window[1]] = others[place, :, window[0], window[1]]
        shares = shares.view(-1, 1)
        return mixed, classes[rows] * shares + classes[partners] * (1 - shares)
