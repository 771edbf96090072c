"""They need the package `datasets`: `tests/test_extras.py` runs them where it is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddpexp.compat.datasets import column_of, shuffles_in_buffer

datasets = pytest.importorskip("datasets")


def test_a_column_comes_in_the_order_of_the_data_set() -> None:
    table = pytest.importorskip("pyarrow").table({"x": [1, 2, 3]})
    data = datasets.Dataset(
        table, fingerprint="known"
    )  # datasets makes one of the pickled table, which pyarrow refuses
    assert column_of(data, "x").to_pylist() == [1, 2, 3]
    assert column_of(data.select([2, 0], new_fingerprint="other"), "x").to_pylist() == [3, 1]


def test_a_buffer_for_shuffling_is_found() -> None:
    def rows() -> Iterator[dict[str, int]]:
        yield from ({"x": number} for number in range(3))

    stream = datasets.IterableDataset.from_generator(rows)
    assert not shuffles_in_buffer(stream)
    assert shuffles_in_buffer(stream.shuffle(seed=0, buffer_size=2))
    assert shuffles_in_buffer(stream.shuffle(seed=0, buffer_size=2).map(lambda row: row))
