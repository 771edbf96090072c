"""Undo the side effects of forward passes other than gradients: buffers and random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ddpexp.compat import operators
from ddpexp.compat.modules import buffers_of


class Undo:
    """Snapshots of the buffers of models, and of the random number generators of numpy and Python."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        """Take no snapshot yet."""
        self._models = models
        self._values: list[Tensor] = []  # of the buffers

    @torch.no_grad()
    def take(self) -> None:
        """Take a snapshot in place of the last one; uninitialized buffers of lazy modules have no values yet."""
        self._slots = _slots(self._models)
        self._buffers = [buffer for _, _, buffer in self._slots if buffer is not None]
        if _are_alike(self._buffers, self._values):
            _copy(self._values, self._buffers)  # into the same memory: for ResNet-50 two launches instead of 159
        else:
            self._values = [buffer.clone() for buffer in self._buffers]
        self._numpy, self._python = np.random.get_state(), random.getstate()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the last snapshot: the modules get the same tensor objects back, with their values at the time."""
        for holder, key, buffer in self._slots:
            holder[key] = buffer
        _copy(self._buffers, self._values)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


@contextmanager
def on_copies(models: Mapping[str, nn.Module], device: torch.device) -> Iterator[None]:
    """Have models change copies of their buffers inside the block, and leave all random numbers as they were.

    The buffers themselves are not written to: a graph that needs their values can wait for its backward pass.
    """
    slots, states = _slots(models), (np.random.get_state(), random.getstate())
    for holder, key, buffer in slots:
        holder[key] = None if buffer is None else buffer.clone()
    try:
        with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
            yield
    finally:
        for holder, key, buffer in slots:
            holder[key] = buffer
        np.random.set_state(states[0])
        random.setstate(states[1])


def _slots(models: Mapping[str, nn.Module]) -> list[tuple[dict[str, Tensor | None], str, Tensor | None]]:
    """Return where modules hold their buffers, with their names and values."""
    return [
        (buffers_of(module), key, buffer)
        for root in models.values()
        for module in root.modules()
        for key, buffer in buffers_of(module).items()
        if buffer is None or not is_lazy(buffer)
    ]


def _are_alike(tensors: list[Tensor], others: list[Tensor]) -> bool:
    """Return whether two lists have tensors of the same shapes, dtypes and devices."""
    return len(tensors) == len(others) and all(
        one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
        for one, other in zip(tensors, others, strict=True)
    )


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors, those of a dtype in one launch."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        pair = by_dtype.setdefault(target.dtype, ([], []))
        pair[0].append(target)
        pair[1].append(source)
    for pair in by_dtype.values():
        operators.foreach_copy_(*pair)
