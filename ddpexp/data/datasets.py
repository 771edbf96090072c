"""Data sets that return a batch of samples in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpexp.data.order import Order, Permutation, Shuffled, TrainingOrder
from ddpexp.distributed.transfers import gathered
from ddpexp.errors import RefusedError

_SHARE = 0.1  # of the free memory of a GPU, for sets that are moved there without being asked for


@runtime_checkable
class IndexData(Protocol):
    """The preferred kind of data set: a length, and a method that gathers a batch."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def gather(self, indices: Tensor, device: torch.device) -> Any:
        """Return the samples as tensors on `device`. Shapes: `indices` is (batch,), int64, on the CPU."""
        ...


@runtime_checkable
class DeviceData(Protocol):
    """An index data set that can be moved to a device, for `data.on_device=true`."""

    @property
    def num_bytes(self) -> int:
        """Return its size on the device."""
        ...

    def to(self, device: torch.device) -> IndexData:
        """Return the same set on the device; its `gather` takes indices on the device and does not synchronise."""
        ...


@runtime_checkable
class PlacedData(DeviceData, Protocol):
    """An index data set that `data.on_device=auto` moves to a GPU that has room for it."""

    @property
    def is_faster_on_device(self) -> bool:
        """Return whether batches are made there in less time."""
        ...


@runtime_checkable
class TokenData(Protocol):
    """An index data set of sequences of one length, of which runs record the tokens per second."""

    @property
    def tokens_per_sample(self) -> int:
        """Return the length of a sample."""
        ...


@runtime_checkable
class EpochData(Protocol):
    """An index data set that differs in each training epoch because of augmentation.

    The augmentation is a function of seed, epoch and sample alone, so `gather` uses no random number generator.
    """

    def of_epoch(self, seed: int, epoch: int) -> IndexData:
        """Return the data set to train on in one epoch; for evaluation the data set itself is used."""
        ...


@runtime_checkable
class DrawingData(Protocol):
    """An index data set that knows whether its `gather` may draw random numbers, because it consists of others."""

    @property
    def draws(self) -> bool:
        """Return whether `gather` may use torch's random number generators."""
        ...


@runtime_checkable
class StagedData(Protocol):
    """An index data set whose `gather` has two halves, of which the first runs ahead of the steps on a GPU."""

    def fetch(self, indices: Tensor, pinned: bool) -> Any:
        """Make a batch on the host, in any thread, without random number generators. Shapes: as in `gather`."""
        ...

    def finish(self, batch: Any, device: torch.device) -> Any:
        """Move what `fetch` has made to the device, and return what `gather` would."""
        ...


@runtime_checkable
class PairedData(Protocol):
    """What `of_epoch` may return: each sample is mixed with a partner, another sample of the same global batch.

    The partner of position p of the global batch is position p ^ 1, whatever the number of workers and micro-batches;
    that of the last one of an odd number is itself. A rank fetches the partners of its samples too.
    """

    def fetch_pairs(self, indices: Tensor, partners: Tensor, pinned: bool) -> Any:
        """Make a batch on the host, as `StagedData.fetch`. Shapes: `indices` and `partners` (batch,)."""
        ...

    def finish(self, batch: Any, device: torch.device) -> Any:
        """Move the batch to the device, mix each sample with its partner, and return what `gather` would."""
        ...


@runtime_checkable
class OrderedData(TrainingOrder, Protocol):
    """A data set, index or map-style, that brings its own training order: a mixture, say, or buckets by length.

    `samples_per_epoch` takes the place of its length wherever an epoch is counted. In evaluation it is read like any
    other set: each of its `len` samples once.
    """

    def __len__(self) -> int:
        """Return the number of samples: the indices that an order returns are below it."""
        ...


@runtime_checkable
class SelectableData(Protocol):
    """An ordered data set of which a part can be trained on, for `data.validation_fraction` and the like."""

    def select(self, indices: NDArray[np.int64]) -> Any:
        """Return a data set of these samples alone, in this sequence, with its own training order."""
        ...


@dataclass(frozen=True)
class Splits:
    """The data of a recipe: one training set, and named evaluation sets.

    The metrics of the set named `eval` are the result of the run.
    A set is an `IndexData` or a map-style torch Dataset.
    """

    train: Any
    evals: Mapping[str, Any]
    order: TrainingOrder | None = None  # of the training set; None: its own, or else a shuffle of all its samples
    on_device: bool = False  # all samples are on the device, and so are the indices


@dataclass(frozen=True)
class Arrays:
    """Tensors of equal length, often memory-mapped, and a transform that makes a batch from their rows."""

    tensors: Sequence[Tensor]
    transform: Callable[..., Any] = field(default=lambda *rows: rows)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.tensors[0])

    def gather(self, indices: Tensor, device: torch.device) -> Any:
        """Gather rows as stored, move them, then transform on the device. Shapes: (batch, ...) each."""
        return self.transform(*(gathered(tensor, indices, device) for tensor in self.tensors))

    @property
    def num_bytes(self) -> int:
        """Return the size of all rows."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def to(self, device: torch.device) -> Arrays:
        """Return the same rows on the device."""
        return replace(self, tensors=[tensor.to(device) for tensor in self.tensors])


@dataclass(frozen=True)
class Subset:
    """The samples `offset <= i < offset + length` of a fixed shuffle of another index data set."""

    data: IndexData
    shuffle: Order
    offset: int
    length: int
    table: Tensor | None = None  # the indices of all its samples, on the device of the data

    def __len__(self) -> int:
        """Return the number of samples in the subset."""
        return self.length

    def gather(self, indices: Tensor, device: torch.device) -> Any:
        """Gather from the underlying set. Shapes: as in its `gather`."""
        return self.data.gather(self.places(indices), device)

    def places(self, indices: Tensor) -> Tensor:
        """Return the indices of samples in the underlying set. Shapes: as `indices`."""
        if self.table is not None:
            return self.table.index_select(0, indices)
        return torch.from_numpy(self.shuffle(indices.numpy() + self.offset))


def training_order(data: Any) -> TrainingOrder:
    """Return the order in which a data set is trained on: its own, or else a shuffle of all its samples."""
    return data if isinstance(data, OrderedData) else Shuffled(len(data))


def of_epoch(data: IndexData, seed: int, epoch: int) -> IndexData:
    """Return the data set, which may be a subset, to train on in one epoch."""
    if isinstance(data, Subset):
        return replace(data, data=of_epoch(data.data, seed, epoch))
    return data.of_epoch(seed, epoch) if isinstance(data, EpochData) else data


def is_staged(data: IndexData) -> bool:
    """Return whether a set, which may be a subset, fetches batches ahead or mixes samples with partners."""
    return is_staged(data.data) if isinstance(data, Subset) else isinstance(data, StagedData | PairedData)


def fetch(data: Any, indices: Tensor, partners: Tensor | None, pinned: bool) -> Any:
    """Fetch a batch of a staged set, which may be a subset; without partners those are the samples themselves."""
    if isinstance(data, Subset):
        places = data.places(indices)
        return fetch(data.data, places, None if partners is None else data.places(partners), pinned)
    if isinstance(data, PairedData):
        return data.fetch_pairs(indices, indices if partners is None else partners, pinned)
    return data.fetch(indices, pinned)


def finish(data: Any, batch: Any, device: torch.device) -> Any:
    """Move a fetched batch of a staged set, which may be a subset, to the device."""
    return finish(data.data, batch, device) if isinstance(data, Subset) else data.finish(batch, device)


def on_device(splits: Splits, device: torch.device) -> Splits:
    """Return the data sets with their samples on the device; samples shared by several subsets are stored once.

    Raises:
        RefusedError: a set cannot be moved, or there is not enough memory.
    """
    parts = {"train": splits.train, **splits.evals}
    for name, part in parts.items():
        if not isinstance(whole_set(part), DeviceData):
            raise RefusedError(
                f"data.on_device=true: `{name}` is a {type(whole_set(part)).__name__}, which cannot be moved to a "
                "device. Return ddpexp.data.datasets.Arrays, give it num_bytes and to(device), or leave "
                "data.on_device=false."
            )
    wholes = {id(whole): whole for whole in map(whole_set, parts.values())}
    if device.type == "cuda":
        size, (free, _) = device_bytes(splits), torch.cuda.mem_get_info(device)
        if size > free:
            raise RefusedError(
                f"data.on_device=true: the samples take {size / 1e9:,.1f} GB, and of GPU {device.index} "
                f"{free / 1e9:,.1f} GB are free. Leave data.on_device=false."
            )
    there = {number: whole.to(device) for number, whole in wholes.items()}
    train, *evals = (_part_of(there[id(whole_set(part))], part, device) for part in parts.values())
    own = splits.train if isinstance(splits.train, OrderedData) else None  # an order is a matter of the host
    return Splits(train, dict(zip(splits.evals, evals, strict=True)), splits.order or own, on_device=True)


def belongs_on_device(splits: Splits, device: torch.device) -> bool:
    """Return whether `data.on_device=auto` moves the sets to the device: a GPU with room for them.

    They take a tenth of its free memory at most; the rest is for the model, whose size is not known yet.
    """
    if device.type != "cuda" or not prefer_device(splits):
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return device_bytes(splits) <= _SHARE * free


def prefer_device(splits: Splits) -> bool:
    """Return whether batches of all sets are made in less time on a GPU."""
    wholes = map(whole_set, (splits.train, *splits.evals.values()))
    return all(isinstance(whole, PlacedData) and whole.is_faster_on_device for whole in wholes)


def device_bytes(splits: Splits) -> int:
    """Return the size of the samples of all sets on a device."""
    wholes = {id(whole): whole for whole in map(whole_set, (splits.train, *splits.evals.values()))}
    return sum(whole.num_bytes for whole in wholes.values())


def whole_set(data: Any) -> Any:
    """Return the data set that a subset is of."""
    return whole_set(data.data) if isinstance(data, Subset) else data


def _part_of(whole: IndexData, part: Any, device: torch.device) -> IndexData:
    if not isinstance(part, Subset):
        return whole
    table = part.places(torch.arange(len(part))).to(device)
    return replace(part, data=_part_of(whole, part.data, device), table=table)


def may_draw(data: IndexData) -> bool:
    """Return whether `gather` may use torch's random number generators."""
    if isinstance(data, Subset):
        return may_draw(data.data)
    return data.draws if isinstance(data, DrawingData) else not isinstance(data, EpochData)


def hold_out(train: Any, fraction: float) -> tuple[Any, Any]:
    """Split a set into a training and a held-out part; the split is the same in every run.

    The split does not depend on `trainer.seed`: runs that differ only in the seed are evaluated on the same samples.
    """
    shuffle = Permutation(len(train), seed=0, epoch=0)
    held = min(len(train) - 1, max(1, round(fraction * len(train))))
    kept = len(train) - held
    key = f"data.validation_fraction={fraction}"
    return select(train, shuffle, 0, kept, key), part(train, shuffle, kept, held)


def choose_samples(train: Any, count: int) -> Any:
    """Return `count` samples chosen at random, the same ones in every run; the whole set if it has no more."""
    if count >= len(train):
        return train
    shuffle = Permutation(len(train), seed=0, epoch=1)  # another one than that of `hold_out`
    return select(train, shuffle, 0, count, f"trainer.limit_train_samples={count}")


def select(data: Any, order: Order, offset: int, length: int, key: str) -> Any:
    """Return a part of a training set; of one with an order of its own, a part with an order of its own.

    `key` is the override that wants a part.

    Raises:
        RefusedError: the set has an order of its own, and no method `select`.
    """
    if not isinstance(data, OrderedData):
        return part(data, order, offset, length)
    if not isinstance(data, SelectableData):
        raise RefusedError(
            f"{key}: `train` is a {type(data).__name__} with a training order of its own, of which no part can be "
            "taken. Leave the key out, or give the set a method select(indices) (ddpexp.data.datasets.SelectableData)."
        )
    return data.select(order(np.arange(offset, offset + length)))


def part(data: Any, order: Order, offset: int, length: int) -> Any:
    """Return the samples at these positions of an order, as a set without an order of its own."""
    if isinstance(data, IndexData):
        return Subset(data, order, offset, length)
    return torch.utils.data.Subset(data, order(np.arange(offset, offset + length)).tolist())
