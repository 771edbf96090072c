"""Describing the samples that an error in the user's data code is about."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ddpexp.data.base import IndexData
from ddpexp.errors import CodeError
from ddpexp.system.text import first_few
from ddpexp.system.user_code import place_in_code


def user_code_error(error: Exception, description: str) -> CodeError:
    """Return the user's error with its own name and a description of the samples; call it in the except block."""
    message = f"{error} ({description})".strip()
    return CodeError(type(error).__name__, message, traceback.format_exc(), place_in_code(error))


def describe_samples(data: IndexData, indices: Sequence[int], name: str) -> str:
    """Describe samples of a data set in a message: their indices in it, and in the set that it is a subset of."""
    text = f"{'sample' if len(indices) == 1 else 'samples'} {first_few(indices)} of {len(data):,} in `{name}`"
    whole, places = data.origin(indices)
    if places is indices:
        return text
    verb = "is" if len(indices) == 1 else "are"
    return f"{text}, which {verb} {first_few(places)} of the {len(whole):,} in the whole set"


def first_mismatch(samples: Sequence[Any]) -> int | None:
    """Return the index of the first sample that differs in form from sample 0, or None."""
    return next((number for number, sample in enumerate(samples) if form(sample) != form(samples[0])), None)


def form(sample: Any) -> str:
    """Describe a sample: types and shapes, as in `(float32[28, 28], int)`."""
    if isinstance(sample, Mapping):
        return f"{{{', '.join(f'{key}: {form(value)}' for key, value in sample.items())}}}"
    if isinstance(sample, tuple | list):
        return f"({', '.join(map(form, sample))})"
    if isinstance(sample, Tensor):
        return f"{str(sample.dtype).removeprefix('torch.')}{list(sample.shape)}"
    if hasattr(sample, "dtype") and hasattr(sample, "shape"):  # an array or scalar of numpy
        return f"{sample.dtype}{list(sample.shape)}"
    return type(sample).__name__


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists and mappings."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from tensors_of(value)
