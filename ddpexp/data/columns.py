"""What a data set holds for each sample beside what it trains on: labels, groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddpexp.data.base import LABELS, IndexData


def labels_of(data: IndexData) -> NDArray[Any] | None:
    """Return the class of each sample, or None if it is not known without reading every sample."""
    found = (data.column(name) for name in LABELS)
    return next((labels for labels in found if labels is not None and labels.dtype.kind in "biuUS"), None)


def column_of(data: IndexData, name: str) -> NDArray[Any] | None:
    """Return the value of each sample in a column, which may be an attribute of the data set; None if there is none."""
    return labels_of(data) if name in LABELS else data.column(name)


def places_in(part: Any, whole: IndexData) -> NDArray[np.int64]:
    """Return the indices of the samples of a (nested) subset in the set that it is taken from."""
    indices = np.arange(len(part))
    while part is not whole:
        part, indices = part.data, part.places(torch.from_numpy(indices)).numpy()
    return indices
