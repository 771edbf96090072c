"""What Hugging Face's data sets do not offer in public; nothing here imports them."""

from __future__ import annotations

from typing import Any


def column_of(data: Any, name: str) -> Any:
    """Return a column of a `datasets.Dataset` as `pyarrow.ChunkedArray`, in the order of the data set.

    Private: `Dataset._indices`; datasets 4.0 to 5.2.
    Why: `data[name]` copies the descriptions of all columns.
    When it goes: `data[name]`, which is slower.
    """
    values = data.data.table.column(name)
    return values if data._indices is None else values.take(data._indices.table.column(0))


def shuffles_in_buffer(data: Any) -> bool:
    """Return whether a `datasets.IterableDataset`, or one that it reads, shuffles in a buffer.

    Private: `IterableDataset._ex_iterable`; datasets 4.0 to 5.2.
    Why: its `state_dict` leaves out the samples in the buffer, without saying so.
    When it goes: take every such data set for one with a buffer; a resume then reads it from the beginning.
    """
    return _has_buffer(getattr(data, "_ex_iterable", None))


def _has_buffer(node: Any) -> bool:
    inner = [getattr(node, "ex_iterable", None), *getattr(node, "ex_iterables", ())]
    return "BufferShuffled" in type(node).__name__ or any(_has_buffer(source) for source in inner if source is not None)
