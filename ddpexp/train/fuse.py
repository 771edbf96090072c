"""Optimizers of torch that update all parameters in one kernel; `ddpexp.config.fused` says where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from ddpexp.train.combined_optimizer import is_sparse


def fuse(optimizer: Optimizer, models: Mapping[str, nn.Module]) -> None:
    """Have a newly built SGD, Adam or AdamW of torch update its parameters in one kernel, if torch can do that.

    It cannot for complex parameters and sparse gradients, nor SGD for DTensors.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    are_divided = {hasattr(parameter, "device_mesh") for parameter in parameters}
    sparse = {id(layer.weight) for model in models.values() for layer in model.modules() if is_sparse(layer)}
    if (
        not all(parameter.is_floating_point() and id(parameter) not in sparse for parameter in parameters)
        or len(are_divided) > 1
        or (True in are_divided and isinstance(optimizer, SGD))
    ):
        return
    optimizer.defaults["fused"] = True
    for group in optimizer.param_groups:
        group["fused"] = True
    if isinstance(optimizer, SGD):
        optimizer.register_step_pre_hook(_Momentum())


class _Momentum:
    """Starts the momentum of parameters that get their first gradient later than others, with zeros.

    torch 2.13 raises TypeError in a fused step of SGD in which some parameters have a momentum and others have none.
    """

    def __init__(self) -> None:
        self._is_complete = False

    def __call__(self, optimizer: Optimizer, *_arguments: Any) -> None:
        """Look at the parameters before a step, until all of them have a momentum."""
        if self._is_complete:
            return
        missing = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if group["momentum"] and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        ]
        self._is_complete = not any(parameter.requires_grad for parameter in missing)
        if any("momentum_buffer" in state for state in optimizer.state.values()):
            for parameter in missing:
                if parameter.grad is not None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)


def describe(optimizers: Iterable[Optimizer]) -> str:
    """Return how the optimizers of a run update parameters that was to have fused ones."""
    fused = {bool(group.get("fused")) for optimizer in optimizers for group in optimizer.param_groups}
    if fused == {True}:
        return "optimizer.fused=auto: parameters are updated in one kernel, and in later starts of this run too"
    some = "some parameters are" if True in fused else "no parameters are"
    return f"optimizer.fused=auto: {some} updated in one kernel, which torch has not for all of this model's"
