"""The update of an optimizer of torch as one graph, for trainer.compile_step.

State and settings stay where the optimizer has them, so checkpoints are the same with and without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from ddpexp.compat.optimizers import has_hooks
from ddpexp.distributed.transfers import is_host
from ddpexp.train.whole_graph import whole_graph


class Members(NamedTuple):
    """The parameters of a group that have a gradient, and what the optimizer keeps of each, by its name there."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    state: dict[str, list[Tensor]]
    rate: Tensor  # fp64, so that the graph computes with the number that the optimizer has
    settings: dict[str, Any]  # constants of the graph


class CompiledUpdate:
    """Steps an optimizer by a graph, once the optimizer itself has begun the state of every parameter."""

    def __init__(self, optimizer: SGD | Adam) -> None:
        """Compile the update when it is first needed."""
        self._optimizer = optimizer
        self._kind = _KINDS[type(optimizer)]
        self._rates = [torch.zeros((), dtype=torch.float64) for _ in optimizer.param_groups]
        self._graph = whole_graph(self._kind.update)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups."""
        return self._optimizer.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that have a gradient."""
        groups = []
        for group, rate in zip(self.param_groups, self._rates, strict=True):
            members = self._members(group, rate)
            if members is None:
                self._optimizer.step()
                return
            if members.parameters:
                groups.append(members)
        if groups:
            self._graph(groups)

    def _members(self, group: Mapping[str, Any], rate: Tensor) -> Members | None:
        """Return what is updated of a group; None if a parameter has no state yet."""
        parameters: list[Tensor] = [parameter for parameter in group["params"] if parameter.grad is not None]
        state: dict[str, list[Tensor]] = {}
        for name in self._kind.state(group):
            state[name] = values = []
            for parameter in parameters:
                value = self._optimizer.state[parameter].get(name)
                if value is None:
                    return None
                values.append(value)
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        return Members(
            parameters, gradients, state, rate.fill_(group["lr"]), {name: group[name] for name in self._kind.settings}
        )


def obstacle(optimizer: Optimizer, cycles: bool) -> str | None:
    """Return why the update of an optimizer is not compiled; `cycles`: a schedule changes more than its rate."""
    groups = optimizer.param_groups
    if type(optimizer) not in _KINDS:
        return "is none of SGD, Adam and AdamW of torch"
    if has_hooks(optimizer) or "step" in vars(optimizer):
        return "has hooks around its step"
    if any(group.get("fused") or group.get("differentiable") for group in groups):
        return "has fused=true or differentiable=true"
    if cycles:
        return "gets another momentum in each step by its schedule"
    if not all(is_host(parameter.device) for group in groups for parameter in group["params"]):
        return "is on a GPU, where optimizer.fused=true is one kernel already"
    return None


def _sgd(groups: Sequence[Members]) -> None:
    for group in groups:
        buffers: list[Tensor | None] = [*group.state.get("momentum_buffer", ())]
        gradients = [gradient.clone() for gradient in group.gradients]  # nesterov changes them in place
        sgd(group.parameters, gradients, buffers, lr=group.rate, foreach=True, **group.settings)  # type: ignore[arg-type]


def _adam(groups: Sequence[Members]) -> None:
    for group in groups:
        state, settings = group.state, dict(group.settings)
        beta1, beta2 = settings.pop("betas")
        adam(
            group.parameters, group.gradients, state["exp_avg"], state["exp_avg_sq"], state.get("max_exp_avg_sq", []),
            state["step"], foreach=True, capturable=True, beta1=beta1, beta2=beta2, lr=group.rate, **settings,
        )  # fmt: skip


class _Kind(NamedTuple):
    """How a class of optimizers updates."""

    update: Callable[[Sequence[Members]], None]
    state: Callable[[Mapping[str, Any]], Sequence[str]]  # the names of what it keeps of the parameters of a group
    settings: tuple[str, ...]


_ADAM = _Kind(
    _adam,
    lambda group: ("step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])),
    ("betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"),
)
_KINDS: Mapping[type[Optimizer], _Kind] = {
    SGD: _Kind(
        _sgd,
        lambda group: ("momentum_buffer",) if group["momentum"] else (),
        ("weight_decay", "momentum", "dampening", "nesterov", "maximize"),
    ),
    Adam: _ADAM,
    AdamW: _ADAM,
}
