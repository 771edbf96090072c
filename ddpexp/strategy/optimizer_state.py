"""Loading the state of an optimizer without changing its number formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load what `state_dict` returned; state that is kept in a higher precision than its parameter keeps that."""
    optimizer.load_state_dict(dict(state))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state.get("state", {}).items():
        if not isinstance(index, int):
            continue
        restored: dict[str, Any] = optimizer.state.get(parameters[index]) or {}
        for key, value in values.items():
            # load_state_dict casts to the parameter's dtype.
            if (
                isinstance(value, Tensor)
                and isinstance(restored.get(key), Tensor)
                and restored[key].dtype != value.dtype
            ):
                restored[key] = value.to(restored[key].device, copy=True)
