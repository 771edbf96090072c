"""Tensors of any shapes as parts of one flat tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LINE = 16  # elements: 64 bytes or more


class Layout:
    """Where tensors lie in a flat one, as their own memory format lays them out."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Lay them out one after the other, each at the begin of a cache line."""
        self._shapes = []
        start = 0
        for tensor in tensors:
            stride = torch.empty_like(tensor, device="meta").stride()
            self._shapes.append((tensor.shape, stride, start))
            start += -(-tensor.numel() // _LINE) * _LINE
        self.length = start
        self._known: dict[int, list[Tensor]] = {}

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors in `flat`. Making views takes longer than adding, so they are made once."""
        found = self._known.get(flat.data_ptr())
        if found is None:
            found = self._known[flat.data_ptr()] = [
                flat.as_strided(shape, stride, flat.storage_offset() + start) for shape, stride, start in self._shapes
            ]
        return found
