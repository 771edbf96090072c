"""Copies between the host and a device that do not make the host wait for work that is queued on the device."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_OVERLAPPED_BYTES = 1 << 20  # of a copy that is worth the 10 us that another stream takes


def is_host(device: torch.device) -> bool:
    """Return whether a tensor of the device can be read without waiting for queued work."""
    return device.type == "cpu"


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor from the host without waiting for the GPU, which a copy from unpinned memory would do.

    The copy of a large tensor does not wait for work that is queued on the GPU either.
    """
    if tensor.device == device:
        return tensor
    if device.type == "cuda" and is_host(tensor.device):
        if tensor.layout is torch.strided and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        if tensor.layout is torch.strided and tensor.nbytes >= _OVERLAPPED_BYTES:
            return _overlapped(tensor, device)
    return tensor.to(device, non_blocking=True)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor in nested tuples, lists and mappings to the device."""
    if isinstance(batch, Tensor):
        return moved(batch, device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [to_device(value, device) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def _overlapped(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy pinned memory while the GPU computes; work that is queued from here on waits for the copy."""
    own, current = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(own):
        copied = tensor.to(device, non_blocking=True)  # in memory of its own stream
    current.wait_stream(own)
    copied.record_stream(current)  # once it is freed, that memory waits for work queued here
    return copied


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def rows(tensor: Tensor, indices: Tensor, pinned: bool) -> Tensor:
    """Return rows of a tensor, gathered straight into `pinned` memory, from which they are moved without a copy.

    Rows of a tensor on a device stay there.
    """
    if not pinned or not is_host(tensor.device):
        return tensor.index_select(0, indices)
    out = torch.empty((len(indices), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, indices, out=out)


class LateFlag:
    """A boolean on the device that the host reads later, once it has arrived, without waiting for later work.

    Not for more than one device: its copy is on the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        """Start with false."""
        pinned = device.type == "cuda"
        self._on_host = torch.zeros((), dtype=torch.bool, pin_memory=pinned)
        self._arrived = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def send(self, flag: Tensor) -> None:
        """Replace the value by `flag`. Shapes: a scalar of torch.bool, on the device."""
        self._on_host.copy_(flag, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> bool:
        """Return the value last sent; waits for work that was queued before that."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._on_host)
