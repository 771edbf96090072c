"""A held-out part of a set, and the usual order as an object, for tests of what is made of them."""

from __future__ import annotations

from dataclasses import dataclass

from ddpexp.data.base import IndexData, Subset
from ddpexp.data.datasets import select
from ddpexp.data.order import Order, Permutation
from ddpexp.data.partition import fraction_parts


def hold_out(train: IndexData, fraction: float) -> tuple[IndexData, IndexData]:
    """Split a set into a training and a held-out part, as data.validation_fraction does."""
    kept, held = fraction_parts(len(train), fraction)
    return select(train, *kept, f"data.validation_fraction={fraction}"), Subset(train, *held)


@dataclass(frozen=True)
class Shuffled:
    """The usual order: each epoch visits each sample once."""

    samples_per_epoch: int

    def order(self, seed: int, epoch: int) -> Order:
        return Permutation(self.samples_per_epoch, seed, epoch)
