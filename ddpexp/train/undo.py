"""Undo the side effects of forward passes other than gradients: buffers and random numbers."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy


class Undo:
    """A snapshot of the buffers of models, and of the random number generators of numpy and Python."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        """Take the snapshot; uninitialized buffers of lazy modules have no values yet."""
        slots = [
            (module._buffers, key) for root in models.values() for module in root.modules() for key in module._buffers
        ]
        self._buffers = [
            (holder, key, buffer, None if buffer is None else buffer.detach().clone())
            for holder, key in slots
            if (buffer := holder[key]) is None or not is_lazy(buffer)
        ]
        self._numpy, self._python = np.random.get_state(), random.getstate()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the snapshot: the modules get the same tensor objects back, with their values at the time."""
        for holder, key, buffer, values in self._buffers:
            holder[key] = buffer
            if buffer is not None and values is not None:
                buffer.copy_(values)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
