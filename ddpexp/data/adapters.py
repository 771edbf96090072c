"""Adapters of other libraries' data sets: torch's, lists of samples, streams of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ddpexp.data.base import IndexData, Subset
from ddpexp.data.order import Listed
from ddpexp.data.streams import Stream, as_stream, first_samples


@runtime_checkable
class _Items(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def adapted(data: Any) -> IndexData | Stream | None:
    """Return the set of a recipe as an `IndexData` or a `Stream`; None if it is neither map-style nor iterable data."""
    if isinstance(data, IndexData):
        return data
    if isinstance(stream := as_stream(data), Stream):
        return stream
    if isinstance(data, IterableDataset) or not isinstance(data, _Items):
        return None
    return _part(data) if type(data) is torch.utils.data.Subset else MapStyle(data)


@dataclass(frozen=True)
class MapStyle(IndexData):
    """A map-style set, such as a `torch.utils.data.Dataset` or a list of samples."""

    data: _Items

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        return self.data[index]

    def load_samples(self, indices: Sequence[int], begin: Callable[[int | None], None], epoch_seed: int) -> Any:
        """Load samples; all at once by `__getitems__`, torch's own optional protocol."""
        together = getattr(self.data, "__getitems__", None)
        if together is None:
            return super().load_samples(indices, begin, epoch_seed)
        begin(None)
        return together(indices)

    @property
    def returned(self) -> Any:
        """Return the set that is adapted."""
        return self.data


def sized(data: IndexData | Stream, count: int) -> IndexData:
    """Return a set with a length: of a stream its first `count` samples."""
    return MapStyle(first_samples(data, count)) if isinstance(data, Stream) else data


@dataclass(frozen=True)
class _TorchSubset(Subset):
    given: Any = None

    @property
    def returned(self) -> Any:
        return self.given


def _part(subset: torch.utils.data.Subset[Any]) -> Subset | None:
    whole = adapted(subset.dataset)
    if not isinstance(whole, IndexData):
        return None
    return _TorchSubset(whole, Listed(np.asarray(subset.indices, np.int64)), 0, len(subset), given=subset)
