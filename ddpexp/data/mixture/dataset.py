"""Several data sets as one, whose training order gives each its share."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpexp.data.base import IndexData
from ddpexp.data.datasets import Splits, select
from ddpexp.data.mixture.order import MixtureOrder
from ddpexp.data.mixture.weights import stages
from ddpexp.data.order import Listed, Order, by_value
from ddpexp.data.samples import form
from ddpexp.data.streams import Stream
from ddpexp.errors import DdpexpError, RefusedError


def mix(
    parts: Mapping[str, Splits], weights: Mapping[Any, Any] | None, samples_per_epoch: int | None, batch_size: int
) -> Splits:
    """Return the sources as one training set, with the evaluation sets of each by the name of the source.

    `weights` are those of `data.source_weights`, by name or by step and name. `batch_size` is the global one: an epoch
    has a whole number of them, so that no sample is left out.

    Raises:
        RefusedError: a source is a stream, or an epoch has no global batch.
    """
    names = list(parts)
    for name, part in parts.items():
        if isinstance(part.train, Stream):
            raise RefusedError(
                "is a stream, whose samples have no indices: a mixture needs them", key=f"data.sources.{name}"
            )
    sets = [part.train for part in parts.values()]
    orders = [part.order or part.train for part in parts.values()]
    lengths = [len(data) for data in sets]
    schedule = stages(weights, names)
    starts = [(stage.step * batch_size, stage.weights) for stage in schedule]
    total = sum(order.samples_per_epoch for order in orders) if samples_per_epoch is None else samples_per_epoch
    if total < batch_size:
        raise RefusedError(
            f"an epoch of the mixture has {total:,} samples, fewer than trainer.global_batch_size={batch_size}",
            suggestion="Set data.samples_per_epoch.",
        )
    by_size = [(0, [order.samples_per_epoch for order in orders])]
    order = MixtureOrder(orders, lengths, starts or by_size, total // batch_size * batch_size)
    kind = ItemMixture if any(data.is_loaded for data in sets) else IndexMixture
    evals = {
        name if key == "eval" else f"{name}_{key}": data
        for name, part in parts.items()
        for key, data in part.evals.items()
    }
    return Splits(kind(names, sets, order), evals)


@dataclass(frozen=True)
class _Fetched:
    """A batch of each source, by its number, and the places of the samples of the mixture in their sequence."""

    parts: Mapping[int, Any]
    back: Tensor


@dataclass(frozen=True)
class _Mixture(IndexData):
    """Data sets one after the other, and the order that mixes them."""

    names: Sequence[str]
    parts: Sequence[IndexData]
    mixed: MixtureOrder

    def __len__(self) -> int:
        """Return the number of samples of all sources."""
        return sum(map(len, self.parts))

    @property
    def samples_per_epoch(self) -> int:
        """Return the number of positions in an epoch."""
        return self.mixed.samples_per_epoch

    def order(self, seed: int, epoch: int) -> Order:
        """Return the training order of an epoch."""
        return self.mixed.order(seed, epoch)

    def select(self, indices: NDArray[np.int64]) -> _Mixture:
        """Return the mixture of those samples of each source that are among the indices."""
        parts, first = list[IndexData](), 0
        for name, part in zip(self.names, self.parts, strict=True):
            own = indices[(indices >= first) & (indices < first + len(part))] - first
            if not len(own):
                raise RefusedError(
                    "has no training samples left", key=f"data.sources.{name}", suggestion="Hold out fewer samples."
                )
            parts.append(select(part, Listed(own), 0, len(own), "a part of the mixture"))
            first += len(part)
        mixed = replace(
            self.mixed,
            sources=parts,
            lengths=[len(part) for part in parts],
            samples_per_epoch=int(self.samples_per_epoch * (len(indices) / len(self))),
        )
        return replace(self, parts=parts, mixed=mixed)


@dataclass(frozen=True)
class IndexMixture(_Mixture):
    """A mixture of sets that make batches."""

    def fetch(self, indices: Tensor, pinned: bool = False) -> _Fetched:
        """Fetch from each source its own samples."""
        ends = np.array(list(accumulate(map(len, self.parts))))
        wanted = indices.numpy()
        sources = np.searchsorted(ends, wanted, side="right")
        places = dict(by_value(sources))
        firsts = {number: ends[number] - len(self.parts[number]) for number in places}
        batches = {
            number: self.parts[number].fetch(torch.from_numpy(wanted[chosen] - firsts[number]), pinned)
            for number, chosen in places.items()
        }
        return _Fetched(batches, torch.from_numpy(np.argsort(np.concatenate(list(places.values())))))

    def stage(self, batch: _Fetched, device: torch.device) -> Any:
        """Return the samples of all sources as one batch, in the order of the indices. Shapes: as in theirs."""
        batches = [self.parts[number].stage(part, device) for number, part in batch.parts.items()]
        if len(batches) == 1:
            return batches[0]
        try:
            return _joined(batches, batch.back.to(device))
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            raise self._different(list(batch.parts), batches) from error

    def of_epoch(self, seed: int, epoch: int) -> IndexMixture:
        """Return the mixture with the augmentation of an epoch."""
        return replace(self, parts=[part.of_epoch(seed, epoch) for part in self.parts])

    def _different(self, numbers: Sequence[int], batches: Sequence[Any]) -> DdpexpError:
        forms = "; ".join(f"{self.names[number]} {form(batch)}" for number, batch in zip(numbers, batches, strict=True))
        return DdpexpError(f"The batches of the sources do not fit together: {forms}", key="data.sources")


class ItemMixture(_Mixture):
    """A mixture of sets of which DataLoader workers load the samples of at least one."""

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        ends = list(accumulate(map(len, self.parts)))
        source = bisect_right(ends, index)
        part, number = self.parts[source], index - ends[source] + len(self.parts[source])
        return part[number] if part.is_loaded else _first(part.gather(torch.tensor([number]), torch.device("cpu")))


def _joined(batches: Sequence[Any], back: Tensor) -> Any:
    """Return batches of equal structure as one, with its rows in another order."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches)).index_select(0, back)
    if isinstance(first, Mapping):
        return {key: _joined([batch[key] for batch in batches], back) for key in first}
    joined = [_joined(group, back) for group in zip(*batches, strict=True)]
    return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)


def _first(batch: Any) -> Any:
    """Return the first sample of a batch."""
    if isinstance(batch, Mapping):
        return {key: _first(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [_first(value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch[0]
