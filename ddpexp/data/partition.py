"""Divide samples into a part to train on and a held-out part: by a fraction or by folds, stratified or by groups.

A division depends on the samples alone, never on `trainer.seed`, and is the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddpexp.data.order import Listed, Order, Permutation
from ddpexp.errors import RefusedError

_MOST_FOLDS = 100  # that groups are put into for a fraction


class OrderSlice(NamedTuple):
    """The samples at positions [offset, offset + length) of an order."""

    order: Order
    offset: int
    length: int

    def indices(self) -> NDArray[np.int64]:
        """Return all its samples."""
        return self.order(np.arange(self.offset, self.offset + self.length))


@dataclass(frozen=True)
class _Without:
    """An order without the positions [start, start + length)."""

    order: Order
    start: int
    length: int

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.order(np.where(positions < self.start, positions, positions + self.length))


def fraction_parts(
    count: int, fraction: float, labels: NDArray[Any] | None = None, groups: NDArray[Any] | None = None
) -> tuple[OrderSlice, OrderSlice]:
    """Return the part to train on and the held-out part, which is close to `fraction` of the samples.

    With `labels` each class has its share in both, to the sample; with `groups` none is divided.

    Shapes: labels, groups (count,).
    """
    if groups is not None:
        # The samples in many folds, of which as many are held out as the fraction stands for.
        folds = min(_MOST_FOLDS, len(np.unique(groups)))
        member = _grouped(groups, max(2, folds), labels)
        chosen = Permutation(folds, seed=0, epoch=0)(np.arange(min(folds - 1, max(1, round(fraction * folds)))))
        return _parts_of(np.isin(member, chosen))
    order = _spread(labels) if labels is not None else Permutation(count, seed=0, epoch=0)
    held = min(count - 1, max(1, round(fraction * count)))
    return OrderSlice(order, 0, count - held), OrderSlice(order, count - held, held)


def fold_parts(
    count: int, fold: int, folds: int, labels: NDArray[Any] | None = None, groups: NDArray[Any] | None = None
) -> tuple[OrderSlice, OrderSlice]:
    """Return the part to train on and fold number `fold` of `folds`, which is held out.

    Each sample is in exactly one fold. With `labels` each class is spread over all folds evenly; with `groups` none
    is divided.

    Shapes: labels, groups (count,).
    """
    if groups is not None:
        return _parts_of(_grouped(groups, folds, labels) == fold)
    order = _spread(labels) if labels is not None else Permutation(count, seed=0, epoch=0)
    start, stop = (number * count // folds for number in (fold, fold + 1))
    length = stop - start
    return OrderSlice(_Without(order, start, length), 0, count - length), OrderSlice(order, start, length)


def _parts_of(is_held: NDArray[np.bool_]) -> tuple[OrderSlice, OrderSlice]:
    kept, held = np.flatnonzero(~is_held), np.flatnonzero(is_held)
    return OrderSlice(Listed(kept), 0, len(kept)), OrderSlice(Listed(held), 0, len(held))


def _spread(labels: NDArray[Any]) -> Listed:
    """Return an order, shuffled within each class, of which every stretch holds each class by its share."""
    shuffled = Permutation(len(labels), seed=0, epoch=0)(np.arange(len(labels)))
    _, classes, counts = np.unique(labels[shuffled], return_inverse=True, return_counts=True)
    by_class = np.argsort(classes, kind="stable")
    begins = np.cumsum(counts) - counts
    place = np.empty(len(labels))
    place[by_class] = (np.arange(len(labels)) - np.repeat(begins, counts) + 0.5) / np.repeat(counts, counts)
    return Listed(shuffled[np.lexsort((classes, place))])


def _grouped(groups: NDArray[Any], folds: int, labels: NDArray[Any] | None) -> NDArray[np.int64]:
    """Return the fold of each sample: groups from the largest to the smallest, each to the fold that lacks it most."""
    names, number = np.unique(groups, return_inverse=True)
    if len(names) == 1:
        raise RefusedError(
            "gives all samples the same group, and a group is never split",
            key="data.group_by",
            suggestion="Group by values that differ.",
        )
    if len(names) < folds:
        raise RefusedError(
            f"is more than the {len(names)} groups of data.group_by, and a group is never split",
            key="data.folds",
            value=folds,
            suggestion=f"Use data.folds={len(names)} or fewer.",
        )
    classes = np.zeros(len(groups), np.int64) if labels is None else np.unique(labels, return_inverse=True)[1]
    table = np.zeros((len(names), classes.max() + 1))
    np.add.at(table, (number, classes), 1)
    shuffled = Permutation(len(names), seed=0, epoch=0)(np.arange(len(names)))
    order = shuffled[np.argsort(-table[shuffled].sum(1), kind="stable")]
    share, filled = table / table.sum(0), np.zeros((folds, table.shape[1]))
    of_group = np.empty(len(names), np.int64)
    for group in order:
        # The fold in which the sum of squares grows least; empty folds first, so that none stays empty.
        growth = (2 * filled * share[group]).sum(1)
        of_group[group] = chosen = int(np.lexsort((filled.sum(1), growth))[0])
        filled[chosen] += share[group]
    return of_group[number]
