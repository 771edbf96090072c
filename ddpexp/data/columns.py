"""What a data set holds for each sample beside what it trains on: labels, groups."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from ddpexp.data.datasets import Arrays, Subset

_LABELS = ("labels", "targets")  # the attributes of our own sets, and of torchvision's


@runtime_checkable
class ColumnData(Protocol):
    """A data set with named columns."""

    def column(self, name: str) -> NDArray[Any] | None:
        """Return the value of each sample in a column; None if there is no such column."""
        ...


def labels_of(data: Any) -> NDArray[Any] | None:
    """Return the class of each sample, or None if it is not known without reading every sample.

    It is the attribute `labels` or `targets` or, of `Arrays`, the last tensor if that is a vector of integers.
    """
    if type(data) is torch.utils.data.Subset:
        labels = labels_of(data.dataset)
        return labels[np.asarray(data.indices, np.int64)] if labels is not None else None
    if isinstance(data, Arrays):
        last = data.tensors[-1]
        return last.cpu().numpy() if last.ndim == 1 and not last.is_floating_point() else None
    found = (_vector(getattr(data, name, None), len(data)) for name in _LABELS)
    return next((labels for labels in found if labels is not None and labels.dtype.kind in "biuUS"), None)


def column_of(data: Any, name: str) -> NDArray[Any] | None:
    """Return the value of each sample in a column, which may be an attribute of the data set; None if there is none."""
    if isinstance(data, ColumnData):
        return data.column(name)
    if type(data) is torch.utils.data.Subset:
        column = column_of(data.dataset, name)
        return column[np.asarray(data.indices, np.int64)] if column is not None else None
    if name in _LABELS:
        return labels_of(data)
    return _vector(getattr(data, name, None), len(data)) if name.isidentifier() else None


def places_in(part: Any, whole: Any) -> NDArray[np.int64]:
    """Return the indices of the samples of a (nested) subset in the set that it is taken from."""
    indices = np.arange(len(part))
    while part is not whole:
        if isinstance(part, Subset):
            part, indices = part.data, part.places(torch.from_numpy(indices)).numpy()
        else:
            part, indices = part.dataset, np.asarray(part.indices, np.int64)[indices]
    return indices


def _vector(values: Any, length: int) -> NDArray[Any] | None:
    """Return values as an array if there is one for each sample."""
    if isinstance(values, torch.Tensor):
        values = values.cpu().numpy()
    if not isinstance(values, np.ndarray | list | tuple) or len(values) != length:
        return None
    try:
        array = np.asarray(values)
    except ValueError:  # of different lengths
        return None
    return array if array.ndim == 1 and array.dtype.kind in "biufUS" else None
