"""Tensors of any shapes as views of one flat tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16  # elements: 64 bytes or more


class Layout:
    """The positions of tensors in a flat tensor, each in its own memory format."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Place the tensors one after the other, each at the start of a cache line."""
        self._shapes = []
        start = 0
        for tensor in tensors:
            stride = torch.empty_like(tensor, device="meta").stride()
            self._shapes.append((tensor.shape, stride, start))
            start += -(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT
        self.length = start
        self._cached: dict[int, list[Tensor]] = {}

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors as views of `flat`; cached, because creating views takes longer than adding them up."""
        views = self._cached.get(flat.data_ptr())
        if views is None:
            views = self._cached[flat.data_ptr()] = [
                flat.as_strided(shape, stride, flat.storage_offset() + start) for shape, stride, start in self._shapes
            ]
        return views
