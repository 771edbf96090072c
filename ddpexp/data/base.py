"""The base of all data sets of which samples have an index, and a part of one.

A kind of data overrides what differs from the defaults; nothing asks for its type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from ddpexp.data.order import Order, Permutation
from ddpexp.data.schema import Schema
from ddpexp.distributed.transfers import to_device

LABELS = ("labels", "targets")  # columns with the class of each sample: their names in our sets, and in torchvision's


@dataclass(frozen=True)
class SampleNames:
    """What samples are called: a file, an id; `column` is what a table of predictions calls it."""

    column: str
    values: Sequence[str | int]


class IndexData:
    """A data set of which samples have an index.

    A kind of data defines `__len__`, and `fetch`, which makes a batch in one call, or `__getitem__`, by which
    DataLoader workers load one sample after the other. All else has a default.
    """

    schema: Schema | None = None
    """What the training part of the data has decided about columns, categories and statistics."""

    fetches_ahead: bool = False
    """Whether `fetch` runs ahead of the steps on a GPU, in another thread; it uses no generators then."""

    is_faster_on_device: bool = False
    """Whether batches are made in less time on a GPU: `data.on_device=auto` moves the set there."""

    def __len__(self) -> int:
        """Return the number of samples."""
        raise NotImplementedError

    # A batch in one call.

    def fetch(self, indices: Tensor, pinned: bool = False) -> Any:
        """Return samples where they are stored, as tensors, in pinned memory of the host if `pinned`.

        Shapes: `indices` is (batch,), int64, on the CPU, or on the device of a set that `to` has moved.
        """
        return self.collate(self.load_samples(indices.tolist(), lambda place: None, 0))

    def stage(self, batch: Any, device: torch.device) -> Any:
        """Return what `fetch` has returned as a batch on the device."""
        return to_device(batch, device)

    def gather(self, indices: Tensor, device: torch.device) -> Any:
        """Return a batch on the device. Shapes: `indices` as in `fetch`."""
        return self.stage(self.fetch(indices, device.type == "cuda"), device)

    # A sample by itself.

    def __getitem__(self, index: int) -> Any:
        """Return a sample: the one that DataLoader workers load, or that transforms of the user get."""
        raise TypeError(f"a {type(self).__name__} makes batches, and has no samples by themselves")

    @property
    def has_samples(self) -> bool:
        """Return whether samples can be loaded by themselves."""
        return type(self).__getitem__ is not IndexData.__getitem__

    @property
    def is_loaded(self) -> bool:
        """Return whether DataLoader workers load the samples and collate them, since no call makes a batch."""
        return type(self).fetch is IndexData.fetch

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """Return the function that makes a batch of samples that were loaded."""
        return default_collate

    def load_samples(self, indices: Sequence[int], begin: Callable[[int | None], None], epoch_seed: int) -> Any:
        """Load samples in the epoch that has this seed.

        `begin` is called before each with its place among the indices, or with None before several at once.
        """
        samples = []
        for place, index in enumerate(indices):
            begin(place)
            samples.append(self[index])
        return samples

    @property
    def lacks(self) -> str | None:
        """Return what every kind of data has to define and this one does not; None if nothing is missing."""
        if type(self).__len__ is IndexData.__len__:
            return "__len__"
        return "fetch or __getitem__" if self.is_loaded and not self.has_samples else None

    # Epochs and their order.

    def of_epoch(self, seed: int, epoch: int) -> IndexData:
        """Return the set to train on in one epoch; in evaluation the set itself is used.

        Random changes are a function of seed, epoch and sample alone.
        """
        return self

    @property
    def brings_order(self) -> bool:
        """Return whether the set has a training order of its own, as a mixture has."""
        return type(self).order is not IndexData.order

    @property
    def samples_per_epoch(self) -> int:
        """Return how many positions the order of an epoch has."""
        return len(self)

    def order(self, seed: int, epoch: int) -> Order:
        """Return the training order of one epoch: positions to indices. In evaluation each sample is read once."""
        return Permutation(self.samples_per_epoch, seed, epoch)

    def select(self, indices: NDArray[np.int64]) -> IndexData | None:
        """Return these samples of a set with an order of its own, as such a set; None if that cannot be divided."""
        return None

    # Partners.

    @property
    def has_partners(self) -> bool:
        """Return whether each sample is mixed with a partner, another sample of the same global batch.

        The partner of position p of the global batch is position p ^ 1, whatever the number of workers and
        micro-batches; that of the last one of an odd number is itself. A rank fetches the partners of its samples too.
        """
        return False

    def fetch_pairs(self, indices: Tensor, partners: Tensor, pinned: bool = False) -> Any:
        """Return samples and their partners as `fetch` does. Shapes: `indices` and `partners` (batch,)."""
        return self.fetch(indices, pinned)

    # Facts.

    @property
    def tokens_per_sample(self) -> int | None:
        """Return the length of samples that are sequences of one length: runs record the tokens per second."""
        return None

    def column(self, name: str) -> NDArray[Any] | None:
        """Return the value of each sample in a column, by default an attribute of `returned`; None if there is none."""
        return vector(getattr(self.returned, name, None), len(self)) if name.isidentifier() else None

    @property
    def sample_names(self) -> SampleNames | None:
        """Return what the samples are called; None if they have only their indices."""
        return None

    @property
    def returned(self) -> Any:
        """Return the object that a recipe has returned: this one, or the one that it adapts."""
        return self

    # Parts, and their place.

    @property
    def num_bytes(self) -> int | None:
        """Return the size of the samples on a device; None if they cannot be moved there."""
        return None

    def to(self, device: torch.device) -> IndexData:
        """Return the same set on the device, where `fetch` neither leaves it nor synchronizes."""
        raise NotImplementedError

    @property
    def whole_set(self) -> IndexData:
        """Return the set that this is a part of, or this one."""
        return self

    def part_of(self, whole: IndexData, device: torch.device) -> IndexData:
        """Return the same part of `whole`, which is that set on the device."""
        return whole

    def origin(self, indices: Sequence[int]) -> tuple[IndexData, Sequence[int]]:
        """Return the set that samples are taken from, and their indices in it."""
        return self, indices


def _of_data(name: str) -> Any:
    return property(lambda subset: getattr(subset.data, name))


@dataclass(frozen=True)
class Subset(IndexData):
    """The samples at the positions `offset <= i < offset + length` of an order of another set."""

    data: IndexData
    positions: Order
    offset: int
    length: int
    table: Tensor | None = None  # the indices of all its samples, on the device of the data

    schema, fetches_ahead = map(_of_data, ("schema", "fetches_ahead"))
    is_faster_on_device, has_samples, is_loaded = map(_of_data, ("is_faster_on_device", "has_samples", "is_loaded"))
    collate, has_partners, tokens_per_sample = map(_of_data, ("collate", "has_partners", "tokens_per_sample"))
    whole_set = _of_data("whole_set")

    def __len__(self) -> int:
        """Return the number of samples in the subset."""
        return self.length

    def places(self, indices: Tensor) -> Tensor:
        """Return the indices of samples in the other set. Shapes: as `indices`."""
        if self.table is not None:
            return self.table.index_select(0, indices)
        return torch.from_numpy(self.positions(indices.numpy() + self.offset))

    def origin(self, indices: Sequence[int]) -> tuple[IndexData, Sequence[int]]:
        """Return the set that samples are taken from, and their indices in it."""
        return self.data.origin(self._listed(indices))

    def fetch(self, indices: Tensor, pinned: bool = False) -> Any:
        """Fetch from the other set."""
        return self.data.fetch(self.places(indices), pinned)

    def fetch_pairs(self, indices: Tensor, partners: Tensor, pinned: bool = False) -> Any:
        """Fetch from the other set."""
        return self.data.fetch_pairs(self.places(indices), self.places(partners), pinned)

    def stage(self, batch: Any, device: torch.device) -> Any:
        """Return a batch of the other set."""
        return self.data.stage(batch, device)

    def __getitem__(self, index: int) -> Any:
        """Return a sample of the other set."""
        return self.data[self._listed([index])[0]]

    def load_samples(self, indices: Sequence[int], begin: Callable[[int | None], None], epoch_seed: int) -> Any:
        """Load samples of the other set."""
        return self.data.load_samples(self._listed(indices), begin, epoch_seed)

    def of_epoch(self, seed: int, epoch: int) -> IndexData:
        """Return the same part of the other set in one epoch."""
        return replace(self, data=self.data.of_epoch(seed, epoch))

    def column(self, name: str) -> NDArray[Any] | None:
        """Return the values of these samples in a column of the other set."""
        values = self.data.column(name)
        return None if values is None else values[np.asarray(self._listed(range(len(self))), np.int64)]

    def part_of(self, whole: IndexData, device: torch.device) -> IndexData:
        """Return the same part of `whole`, with the indices of its samples on the device."""
        table = self.places(torch.arange(len(self))).to(device)
        return replace(self, data=self.data.part_of(whole, device), table=table)

    def _listed(self, indices: Sequence[int]) -> list[int]:
        places: list[int] = self.places(torch.tensor(indices, dtype=torch.int64)).tolist()
        return places


def names_in(data: IndexData) -> SampleNames | None:
    """Return what the samples of a set are called, also of a part of one that has names."""
    whole, places = data.origin(range(len(data)))
    if (names := whole.sample_names) is None:
        return None
    return SampleNames(names.column, [names.values[place] for place in places])


def vector(values: Any, length: int) -> NDArray[Any] | None:
    """Return values as an array if there is one for each of so many samples."""
    if isinstance(values, Tensor):
        values = values.cpu().numpy()
    if not isinstance(values, np.ndarray | list | tuple) or len(values) != length:
        return None
    try:
        array = np.asarray(values)
    except ValueError:  # of different lengths
        return None
    return array if array.ndim == 1 and array.dtype.kind in "biufUS" else None
