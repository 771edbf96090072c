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
from ddpexp.data.mnist.prepare import MEAN, STD


def load(prepared: Mapping[str, Any]) -> Splits:
    """Map what `ddpexp.data.mnist.prepare.prepare` decoded.

    Shapes: a batch is images (batch, 1, 28, 28) float32, normalised, and labels (batch,) int64.
    """
    folder = Path(prepared["folder"])
    return Splits(train=_part(folder, "train"), evals={"eval": _part(folder, "test")})


def _part(folder: Path, part: str) -> Images:
    images = _map(folder / f"{part}-images.npy").unsqueeze(1)
    # Every batch needs labels as int64; they are small enough to be converted once.
    return Images(images, _map(folder / f"{part}-labels.npy").long(), (MEAN,), (STD,))


def _map(path: Path) -> Tensor:
    # Copy-on-write pages are shared between all workers until one writes, which none does; torch wants a writable
    # array, and would warn about a read-only mapping.
    return torch.from_numpy(np.load(path, mmap_mode="c"))
