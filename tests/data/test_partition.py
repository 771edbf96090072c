"""Which samples are held out."""

from __future__ import annotations

import numpy as np
import pytest

from ddpexp.data.order import Permutation
from ddpexp.data.partition import fold_parts, fraction_parts
from tests.refusals import refused

LABELS = np.array([0] * 700 + [1] * 250 + [2] * 50)
GROUPS = np.array([f"patient {number * number % 37}" for number in range(1000)])


@pytest.mark.parametrize("labels", [None, LABELS])
@pytest.mark.parametrize("groups", [None, GROUPS])
def test_each_sample_is_held_out_in_exactly_one_fold(labels: np.ndarray | None, groups: np.ndarray | None) -> None:
    held = []
    for fold in range(5):
        kept, out = (part.indices() for part in fold_parts(1000, fold, 5, labels, groups))
        assert sorted([*kept, *out]) == list(range(1000))
        held += out.tolist()
        if groups is not None:
            assert not set(groups[kept]) & set(groups[out])
        else:
            assert len(out) == 200
        if labels is not None and groups is None:
            assert np.bincount(labels[out]).tolist() == [140, 50, 10]
    assert sorted(held) == list(range(1000))


def test_folds_of_groups_are_of_like_size() -> None:
    sizes = [fold_parts(1000, fold, 5, None, GROUPS)[1].length for fold in range(5)]
    assert max(sizes) - min(sizes) <= 60
    assert min(sizes) > 0


def test_a_fraction_is_the_same_as_ever_and_stratified_where_labels_are_given() -> None:
    kept, held = fraction_parts(1000, 0.1)
    assert (
        np.concatenate([kept.indices(), held.indices()]).tolist() == Permutation(1000, 0, 0)(np.arange(1000)).tolist()
    )
    _, held = fraction_parts(1000, 0.1, LABELS)
    assert np.bincount(LABELS[held.indices()]).tolist() == [70, 25, 5]
    assert held.indices().tolist() == fraction_parts(1000, 0.1, LABELS)[1].indices().tolist()


def test_a_fraction_by_groups_divides_no_group() -> None:
    kept, held = (part.indices() for part in fraction_parts(1000, 0.2, None, GROUPS))
    assert not set(GROUPS[kept]) & set(GROUPS[held])
    assert 150 < len(held) < 250


@pytest.mark.parametrize(("groups", "message"), [([0, 1, 2], "data.folds=5"), ([1], "data.group_by")])
def test_fewer_groups_than_folds_are_refused(groups: list[int], message: str) -> None:
    with refused(message):
        fold_parts(30, 0, 5, None, np.array(groups * (30 // len(groups))))
