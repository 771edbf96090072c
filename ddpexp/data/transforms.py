"""A user's own transforms and `collate` on a data set of single samples, seeded by sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import default_collate

from ddpexp.data.base import IndexData
from ddpexp.distributed.rng import seed_everything, seed_of


@runtime_checkable
class _HasSeed(Protocol):
    def set_random_seed(self, seed: int) -> None: ...


@dataclass(frozen=True)
class Transformed(IndexData):
    """The samples of another set, or of a (nested) subset of one, after transforms.

    Before each sample is read and transformed, Python's, numpy's and torch's generators are seeded with a function of
    seed, epoch and sample, and so is a transform that has a generator of its own and a method `set_random_seed`. So a
    sample is the same at every number of workers, of DataLoader workers and in every micro-batch.
    """

    data: IndexData
    transforms: Sequence[Callable[[Any], Any]] = ()
    of_input: bool = True  # transform the first element of a sample that is a tuple, or else the whole sample
    collate: Callable[[list[Any]], Any] = default_collate

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        """Return a sample as its generators happen to be seeded."""
        return self.transformed(self.data[index])

    def load_samples(self, indices: Sequence[int], begin: Callable[[int | None], None], epoch_seed: int) -> list[Any]:
        """Load samples, and seed the generators before each with a number of this epoch."""
        whole, places = self.data.origin(indices)
        samples = []
        for number, place in enumerate(places):
            begin(number)
            samples.append(self._sample(whole, place, epoch_seed))
        return samples

    def origin(self, indices: Sequence[int]) -> tuple[IndexData, Sequence[int]]:
        """Return the set that samples are taken from, and their indices in it."""
        return self.data.origin(indices)

    def _sample(self, whole: IndexData, index: int, epoch_seed: int) -> Any:
        seed = seed_of(epoch_seed, 0, index, 0)
        torch.default_generator.manual_seed(0)  # albumentations adds torch's seed where a DataLoader's workers run
        for transform in self.transforms:
            if isinstance(transform, _HasSeed):
                transform.set_random_seed(seed & 0xFFFFFFFF)
        seed_everything(seed)
        return self.transformed(whole[index])

    def transformed(self, sample: Any) -> Any:
        """Apply the transforms to a sample."""
        if self.of_input and isinstance(sample, tuple | list) and sample:
            first = self._apply(sample[0])
            return [first, *sample[1:]] if isinstance(sample, list) else (first, *sample[1:])
        return self._apply(sample)

    def _apply(self, value: Any) -> Any:
        for transform in self.transforms:
            if type(transform).__module__.partition(".")[0] == "albumentations":
                value = transform(image=np.asarray(value))["image"]  # type: ignore[call-arg]
            else:
                value = transform(value)
        return value
