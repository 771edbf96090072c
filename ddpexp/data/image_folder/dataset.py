"""Folders of images for training and evaluation, as prepared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpexp.data.base import IndexData
from ddpexp.data.datasets import Splits
from ddpexp.data.image_folder.images import Augmented, ImageFolder
from ddpexp.data.image_folder.mixed import Mixed
from ddpexp.data.image_folder.on_device import AugmentedOnDevice
from ddpexp.data.image_folder.options import options_of
from ddpexp.data.image_folder.stores import open_store
from ddpexp.distributed.rng import AUGMENT, seed_of


def load(prepared: Mapping[str, Any]) -> Splits:
    """Map what `ddpexp.data.image_folder.prepare.prepare` has stored.

    Shapes: a batch is images (batch, channels, size, size) float32, normalized, and labels (batch,) int64, or
    probabilities (batch, classes) float32 in training with mixup or CutMix.
    """
    options = options_of(prepared)
    classes = len(prepared["facts"]["classes"])
    parts = {
        part: (TrainImages if part == "train" else ImageFolder)(
            *open_store(Path(prepared["folder"]), part, prepared), options, classes
        )
        for part in prepared["parts"]
    }
    if "train" not in parts:  # to predict for
        return Splits(train=parts["eval"], evals=parts)
    return Splits(train=parts.pop("train"), evals=parts)


@dataclass(frozen=True)
class TrainImages(ImageFolder):
    """The images of a part to train on."""

    def of_epoch(self, seed: int, epoch: int) -> IndexData:
        """Return these images with the random changes of one epoch."""
        kind = AugmentedOnDevice if self.options.augment_on == "device" else Augmented
        augmented = kind(self, seed_of(seed, AUGMENT, epoch, 0), self.options.size_in(epoch))
        return Mixed(augmented) if self.options.mixup or self.options.cutmix else augmented
