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

from ddpexp.data.datasets import IndexData, Splits, may_draw, of_epoch, select, training_order
from ddpexp.data.mixture.order import MixtureOrder
from ddpexp.data.mixture.weights import stages
from ddpexp.data.order import Order, by_value
from ddpexp.data.samples import form
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
        if not hasattr(part.train, "__len__"):
            raise RefusedError(f"data.sources.{name} is a stream, whose samples have no indices: a mixture needs them.")
    sets = [part.train for part in parts.values()]
    orders = [part.order or training_order(part.train) for part in parts.values()]
    lengths = [len(data) for data in sets]
    schedule = stages(weights, names)
    starts = [(stage.step * batch_size, stage.weights) for stage in schedule]
    total = sum(order.samples_per_epoch for order in orders) if samples_per_epoch is None else samples_per_epoch
    if total < batch_size:
        raise RefusedError(
            f"an epoch of the mixture has {total:,} samples, fewer than trainer.global_batch_size={batch_size}: set "
            "data.samples_per_epoch."
        )
    by_size = [(0, [order.samples_per_epoch for order in orders])]
    order = MixtureOrder(orders, lengths, starts or by_size, total // batch_size * batch_size)
    train = IndexMixture(names, sets, order) if all(isinstance(data, IndexData) for data in sets) else (
        ItemMixture(names, sets, order)
    )  # fmt: skip
    evals = {
        name if key == "eval" else f"{name}_{key}": data
        for name, part in parts.items()
        for key, data in part.evals.items()
    }
    return Splits(train, evals)


@dataclass(frozen=True)
class _Mixture:
    """Data sets one after the other, and the order that mixes them."""

    names: Sequence[str]
    parts: Sequence[Any]
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

    def select(self, indices: NDArray[np.int64]) -> Any:
        """Return the mixture of these samples alone."""
        return replace(self, **_selected(self, indices))


@dataclass(frozen=True)
class IndexMixture(_Mixture):
    """A mixture of index data sets."""

    def gather(self, indices: Tensor, device: torch.device) -> Any:
        """Gather from each source its own samples, and put them in the order of the indices. Shapes: as in theirs."""
        ends = np.array(list(accumulate(map(len, self.parts))))
        wanted = indices.numpy()
        sources = np.searchsorted(ends, wanted, side="right")
        places = dict(by_value(sources))
        firsts = {number: ends[number] - len(self.parts[number]) for number in places}
        batches = [
            self.parts[number].gather(torch.from_numpy(wanted[chosen] - firsts[number]), device)
            for number, chosen in places.items()
        ]
        if len(batches) == 1:
            return batches[0]
        back = torch.from_numpy(np.argsort(np.concatenate(list(places.values())))).to(device)
        try:
            return _joined(batches, back)
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            raise self._different(list(places), batches) from error

    def of_epoch(self, seed: int, epoch: int) -> IndexMixture:
        """Return the mixture with the augmentation of an epoch."""
        return replace(self, parts=[of_epoch(part, seed, epoch) for part in self.parts])

    @property
    def draws(self) -> bool:
        """Return whether `gather` may use torch's random number generators."""
        return any(map(may_draw, self.parts))

    def _different(self, numbers: Sequence[int], batches: Sequence[Any]) -> DdpexpError:
        forms = "; ".join(f"{self.names[number]} {form(batch)}" for number, batch in zip(numbers, batches, strict=True))
        return DdpexpError(f"the sources of the mixture have batches that do not fit together: {forms}.")


class ItemMixture(_Mixture):
    """A mixture of data sets of which at least one is read sample by sample."""

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        ends = list(accumulate(map(len, self.parts)))
        source = bisect_right(ends, index)
        part, number = self.parts[source], index - ends[source] + len(self.parts[source])
        if isinstance(part, IndexData):
            return _first(part.gather(torch.tensor([number]), torch.device("cpu")))
        return part[number]


@dataclass(frozen=True)
class _Table:
    """An order that is a table."""

    indices: NDArray[np.int64]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.indices[positions]


def _selected(mixture: _Mixture, indices: NDArray[np.int64]) -> dict[str, Any]:
    """Return the fields of a mixture with those samples of each source that are among the indices."""
    parts, first = [], 0
    for name, part in zip(mixture.names, mixture.parts, strict=True):
        own = indices[(indices >= first) & (indices < first + len(part))] - first
        if not len(own):
            raise RefusedError(f"of the source {name} no sample is left to train on: keep more samples.")
        kept = select(part, _Table(own), 0, len(own), "a part of the mixture")
        parts.append(kept)
        first += len(part)
    orders, lengths = [training_order(part) for part in parts], [len(part) for part in parts]
    share = len(indices) / len(mixture)
    mixed = replace(
        mixture.mixed, sources=orders, lengths=lengths, samples_per_epoch=int(mixture.samples_per_epoch * share)
    )
    return {"parts": parts, "mixed": mixed}


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
