"""What forward passes leave behind beside gradients, and how it is taken back."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy


class Undo:
    """Buffers, and the random numbers of numpy and Python, as they are when this is made."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        """Copy them; a lazy module's buffers have no values yet."""
        places = [
            (module._buffers, key) for root in models.values() for module in root.modules() for key in module._buffers
        ]
        self._buffers = [
            (holder, key, buffer, None if buffer is None else buffer.detach().clone())
            for holder, key in places
            if (buffer := holder[key]) is None or not is_lazy(buffer)
        ]
        self._numpy, self._python = np.random.get_state(), random.getstate()

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back as they were: a module has the same tensors again, with the values of then."""
        for holder, key, buffer, values in self._buffers:
            holder[key] = buffer
            if buffer is not None and values is not None:
                buffer.copy_(values)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
