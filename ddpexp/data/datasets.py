"""Data sets that answer a batch of indices in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ddpexp.data.order import Permutation
from ddpexp.errors import RefusedError


@runtime_checkable
class IndexData(Protocol):
    """The main kind of data: a length, and a gather."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def gather(self, indices: Tensor, device: torch.device) -> Any:
        """Return the samples as tensors on `device`. Shapes: `indices` is (batch,), int64, on the CPU."""
        ...


@runtime_checkable
class DeviceData(Protocol):
    """An index data set that can lie in the memory of a device, for `data.on_device=true`."""

    @property
    def num_bytes(self) -> int:
        """Return what it takes there."""
        ...

    def to(self, device: torch.device) -> IndexData:
        """Return the same set in the memory of the device, whose gather takes its indices there and waits.

        For nothing.
        """
        ...


@runtime_checkable
class EpochData(Protocol):
    """An index data set that looks different in each epoch of training: an augmented one.

    What it does to a sample is a function of seed, epoch and sample alone, so a gather draws from no generator.
    """

    def of_epoch(self, seed: int, epoch: int) -> IndexData:
        """Return the set as it is trained on in one epoch; the set as it stands is what is evaluated."""
        ...


@dataclass(frozen=True)
class Splits:
    """What a recipe's data gives: one set to train on, named ones to evaluate.

    The evaluation called `eval` is the one whose numbers are the result.
    A set is an `IndexData` or a map-style torch Dataset.
    """

    train: Any
    evals: Mapping[str, Any]


@dataclass(frozen=True)
class Arrays:
    """Tensors of one length, often memory-mapped, and what makes a batch of their rows."""

    tensors: Sequence[Tensor]
    transform: Callable[..., Any] = field(default=lambda *rows: rows)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.tensors[0])

    def gather(self, indices: Tensor, device: torch.device) -> Any:
        """Gather rows as stored, move them, then transform on the device. Shapes: (batch, ...) each."""
        return self.transform(*(moved(tensor.index_select(0, indices), device) for tensor in self.tensors))

    @property
    def num_bytes(self) -> int:
        """Return the size of all rows."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def to(self, device: torch.device) -> Arrays:
        """Return the rows in the memory of the device."""
        return replace(self, tensors=[tensor.to(device) for tensor in self.tensors])


@dataclass(frozen=True)
class Subset:
    """The samples `offset <= i < offset + length` of a fixed shuffle of another index data set."""

    data: IndexData
    shuffle: Permutation
    offset: int
    length: int
    table: Tensor | None = None  # the places of all its samples, on the device where the whole lies

    def __len__(self) -> int:
        """Return the number of samples in this part."""
        return self.length

    def gather(self, indices: Tensor, device: torch.device) -> Any:
        """Gather from the whole. Shapes: as the whole's."""
        return self.data.gather(self.places(indices), device)

    def places(self, indices: Tensor) -> Tensor:
        """Return where the samples are in the whole. Shapes: as `indices`."""
        if self.table is not None:
            return self.table.index_select(0, indices)
        return torch.from_numpy(self.shuffle(indices.numpy() + self.offset))


def of_epoch(data: IndexData, seed: int, epoch: int) -> IndexData:
    """Return an index data set, or a part of one, as it is trained on in one epoch."""
    if isinstance(data, Subset):
        return replace(data, data=of_epoch(data.data, seed, epoch))
    return data.of_epoch(seed, epoch) if isinstance(data, EpochData) else data


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor of the host without waiting for what the GPU still has to do.

    A copy from pages that are not locked would.
    """
    if tensor.device == device:
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def on_device(splits: Splits, device: torch.device) -> Splits:
    """Return the sets with their samples in the memory of the device: each sample once, in however many parts it is.

    Raises:
        RefusedError: a set cannot lie there, or there is no room.
    """
    parts = {"train": splits.train, **splits.evals}
    for name, part in parts.items():
        if not isinstance(_whole(part), DeviceData):
            raise RefusedError(
                f"data.on_device=true: `{name}` is a {type(_whole(part)).__name__}, which cannot lie in the memory of "
                "a device. Return ddpexp.data.datasets.Arrays, give it num_bytes and to(device), or leave "
                "data.on_device=false."
            )
    wholes = {id(whole): whole for whole in map(_whole, parts.values())}
    if device.type == "cuda":
        size, (free, _) = device_bytes(splits), torch.cuda.mem_get_info(device)
        if size > free:
            raise RefusedError(
                f"data.on_device=true: the samples take {size / 1e9:,.1f} GB, and of GPU {device.index} "
                f"{free / 1e9:,.1f} GB are free. Leave data.on_device=false."
            )
    there = {number: whole.to(device) for number, whole in wholes.items()}
    train, *evals = (_part_of(there[id(_whole(part))], part, device) for part in parts.values())
    return Splits(train, dict(zip(splits.evals, evals, strict=True)))


def device_bytes(splits: Splits) -> int:
    """Return what the samples of all sets take in the memory of a device."""
    wholes = {id(whole): whole for whole in map(_whole, (splits.train, *splits.evals.values()))}
    return sum(whole.num_bytes for whole in wholes.values())


def _whole(data: Any) -> Any:
    return _whole(data.data) if isinstance(data, Subset) else data


def _part_of(whole: IndexData, part: Any, device: torch.device) -> IndexData:
    if not isinstance(part, Subset):
        return whole
    table = part.places(torch.arange(len(part))).to(device)
    return replace(part, data=_part_of(whole, part.data, device), table=table)


def may_draw(data: IndexData) -> bool:
    """Tell whether a gather may draw from torch's generators."""
    return may_draw(data.data) if isinstance(data, Subset) else not isinstance(data, EpochData)


def hold_out(train: Any, fraction: float) -> tuple[Any, Any]:
    """Divide a set into what stays and what is held out, the same division in every run.

    The division does not follow `trainer.seed`: runs that differ in the seed alone are judged on the same samples.
    """
    shuffle = Permutation(len(train), seed=0, epoch=0)
    held = min(len(train) - 1, max(1, round(fraction * len(train))))
    kept = len(train) - held
    if isinstance(train, IndexData):
        return Subset(train, shuffle, 0, kept), Subset(train, shuffle, kept, held)
    order = shuffle(np.arange(len(train))).tolist()
    return torch.utils.data.Subset(train, order[:kept]), torch.utils.data.Subset(train, order[kept:])
