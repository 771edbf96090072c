"""MNIST for training: the decoded files, mapped into memory once for all workers of a node."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddpexp.data.datasets import Splits
from ddpexp.data.images.dataset import Images

_MEAN, _DEVIATION = 0.1307, 0.3081  # of the training images, as shares of 255


def load(prepared: Mapping[str, Any]) -> Splits:
    """Map what `mnist_files.prepare` decoded.

    Shapes: a batch is images (batch, 1, 28, 28) float32, normalised, and labels (batch,) int64.
    """
    folder = Path(prepared["folder"])
    return Splits(train=_part(folder, "train"), evals={"eval": _part(folder, "test")})


def _part(folder: Path, part: str) -> Images:
    images = _map(folder / f"{part}-images.npy").unsqueeze(1)
    # Labels are wanted as int64 in every batch; there are few enough to convert them once.
    return Images(images, _map(folder / f"{part}-labels.npy").long(), (_MEAN,), (_DEVIATION,))


def _map(path: Path) -> Tensor:
    # Copy-on-write pages are shared between all workers until somebody writes, which nobody does; torch wants a
    # writable array, so read-only mapping would only bring a warning.
    return torch.from_numpy(np.load(path, mmap_mode="c"))
