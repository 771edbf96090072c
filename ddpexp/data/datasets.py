"""The data sets of a recipe, and their parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpexp.data.base import LABELS, IndexData, Subset
from ddpexp.data.order import Order, Permutation, TrainingOrder
from ddpexp.distributed.transfers import moved, rows
from ddpexp.errors import RefusedError

__all__ = ["Arrays", "IndexData", "Splits", "Subset"]

_SHARE = 0.1  # of the free memory of a GPU, for sets that are moved there without being asked for


@dataclass(frozen=True)
class Splits:
    """The data of a recipe: one training set, and named evaluation sets.

    The metrics of the set named `eval` are the result of the run.
    A set is an `IndexData`, or a map-style or iterable one that `ddpexp.data.adapters` adapts.
    """

    train: Any
    evals: Mapping[str, Any]
    order: TrainingOrder | None = None  # of the training set; None: its own, or else a shuffle of all its samples
    on_device: bool = False  # all samples are on the device, and so are the indices


@dataclass(frozen=True)
class Arrays(IndexData):
    """Tensors of equal length, often memory-mapped, and a transform that makes a batch from their rows."""

    tensors: Sequence[Tensor]
    transform: Callable[..., Any] = field(default=lambda *rows: rows)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.tensors[0])

    def fetch(self, indices: Tensor, pinned: bool = False) -> Any:
        """Return rows as stored. Shapes: (batch, ...) each."""
        return tuple(map(rows, self.tensors, repeat(indices), repeat(pinned)))

    def stage(self, batch: Any, device: torch.device) -> Any:
        """Move rows to the device, then transform them. Shapes: (batch, ...) each."""
        return self.transform(*map(moved, batch, repeat(device)))

    def column(self, name: str) -> NDArray[Any] | None:
        """Return the class of each sample, the last tensor if that is a vector of integers; else an attribute."""
        if name not in LABELS:
            return super().column(name)
        last = self.tensors[-1]
        return last.cpu().numpy() if last.ndim == 1 and not last.is_floating_point() else None

    @property
    def num_bytes(self) -> int:
        """Return the size of all rows."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def to(self, device: torch.device) -> Arrays:
        """Return the same rows on the device."""
        return replace(self, tensors=[tensor.to(device) for tensor in self.tensors])


def map_npy(path: Path) -> Tensor:
    """Map an `.npy` file: copy-on-write, although nothing writes to it, because torch wants a writable array."""
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def on_device(splits: Splits, device: torch.device) -> Splits:
    """Return the data sets with their samples on the device; samples shared by several subsets are stored once.

    Raises:
        RefusedError: a set cannot be moved, or there is not enough memory.
    """
    parts: dict[str, IndexData] = {"train": splits.train, **splits.evals}
    for name, one in parts.items():
        if one.whole_set.num_bytes is None:
            raise RefusedError(
                f"`{name}` is a {kind_of(one.whole_set)}, which cannot be moved to a device",
                key="data.on_device",
                value=True,
                suggestion="Return ddpexp.data.datasets.Arrays, give it num_bytes and to(device) "
                "(ddpexp.data.base.IndexData), or leave data.on_device=false.",
            )
    if device.type == "cuda":
        size, (free, _) = device_bytes(splits), torch.cuda.mem_get_info(device)
        if size > free:
            raise RefusedError(
                f"The samples take {size / 1e9:,.1f} GB, but GPU {device.index} has only {free / 1e9:,.1f} GB free",
                key="data.on_device",
                value=True,
                suggestion="Leave data.on_device=false.",
            )
    there = {id(whole): whole.to(device) for whole in _wholes(splits)}
    train, *evals = (one.part_of(there[id(one.whole_set)], device) for one in parts.values())
    own = splits.train if splits.train.brings_order else None  # an order is a matter of the host
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
    return all(whole.is_faster_on_device for whole in _wholes(splits))


def device_bytes(splits: Splits) -> int:
    """Return the size of the samples of all sets on a device."""
    return sum(whole.num_bytes or 0 for whole in _wholes(splits))


def _wholes(splits: Splits) -> list[IndexData]:
    """Return the sets of which the splits are parts, each once."""
    return list({id(one.whole_set): one.whole_set for one in (splits.train, *splits.evals.values())}.values())


def kind_of(data: IndexData) -> str:
    """Return the name of the class of a set, that of the recipe if it is adapted."""
    return type(data.returned).__name__


def choose_samples(train: IndexData, count: int) -> IndexData:
    """Return `count` samples chosen at random, the same ones in every run; the whole set if it has no more."""
    if count >= len(train):
        return train
    shuffle = Permutation(len(train), seed=0, epoch=1)  # another one than that by which samples are held out
    return select(train, shuffle, 0, count, f"trainer.limit_train_samples={count}")


def select(data: IndexData, order: Order, offset: int, length: int, key: str) -> IndexData:
    """Return a part of a training set; of one with an order of its own, a part with an order of its own.

    `key` is the override that wants a part.

    Raises:
        RefusedError: the set has an order of its own, and no method `select`.
    """
    if not data.brings_order:
        return Subset(data, order, offset, length)
    selected = data.select(order(np.arange(offset, offset + length)))
    if selected is None:
        raise RefusedError(
            f"`train` is a {kind_of(data)} with a training order of its own, so a subset of it cannot be selected",
            key=key,
            suggestion="Leave the key out, or give the set a method select(indices) (ddpexp.data.base.IndexData).",
        )
    return selected
