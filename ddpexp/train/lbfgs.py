"""L-BFGS with one gradient a step, that of the global batch: without a line search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_LEAST_CURVATURE = 1e-10  # of a pair that is remembered, as in torch.optim.LBFGS


class LBFGS(Optimizer):
    """`torch.optim.LBFGS` with `max_iter=1`, whose state is tensors of the shapes of the parameters.

    Source: Nocedal and Wright, "Numerical optimization", 2nd edition, 2006, algorithms 7.4 and 7.5.
    """

    def __init__(self, params: Iterable[Any], lr: float, history_size: int) -> None:
        """Remember the changes of the last `history_size` steps, and those of the gradient."""
        super().__init__(params, {"lr": lr, "history_size": history_size})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step in the direction of quasi-Newton, as long as the learning rate says; the first step is shorter."""
        trained = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not trained:
            return
        states: list[Any] = [self.state[p] for p, _ in trained]
        gradients = [p.grad.detach().clone() for p, _ in trained]
        is_first = "gradient" not in states[0]
        if not is_first:
            self._remember(states, gradients, trained[0][1]["history_size"])
        direction = [-value for value in self._newton(states, gradients)]
        shorter = 1.0
        if is_first:
            shorter = min(1.0, 1.0 / sum(float(value.abs().sum(dtype=torch.float64)) for value in gradients))
        for (p, group), state, gradient, way in zip(trained, states, gradients, direction, strict=True):
            state["gradient"] = gradient
            state["change"] = way * (group["lr"] * shorter)
            p.add_(state["change"])

    @staticmethod
    def _remember(states: Sequence[Any], gradients: Sequence[Tensor], history_size: int) -> None:
        """Add the last step to the history, unless the loss was not convex along it."""
        differences = [gradient - state["gradient"] for state, gradient in zip(states, gradients, strict=True)]
        if _dot(differences, [state["change"] for state in states]) <= _LEAST_CURVATURE:
            return
        for state, difference in zip(states, differences, strict=True):
            for name, value in (("changes", state["change"]), ("differences", difference)):
                before = state.get(name, value[None][:0])
                state[name] = torch.cat([before[-history_size + 1 :] if history_size > 1 else before[:0], value[None]])

    @staticmethod
    def _newton(states: Sequence[Any], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients times the estimate of the inverse Hessian."""
        number = len(states[0].get("changes", ()))
        pairs = [([s["changes"][i] for s in states], [s["differences"][i] for s in states]) for i in range(number)]
        values = [gradient.clone() for gradient in gradients]
        factors = []
        for changes, differences in reversed(pairs):
            factor = _dot(changes, values) / _dot(differences, changes)
            factors.append(factor)
            _add(values, differences, -factor)
        if pairs:
            changes, differences = pairs[-1]
            scale = _dot(differences, changes) / _dot(differences, differences)
            values = [value * scale for value in values]
        for (changes, differences), factor in zip(pairs, reversed(factors), strict=True):
            _add(values, changes, factor - _dot(differences, values) / _dot(differences, changes))
        return values


def _dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Return the scalar product over all parameters."""
    return sum(float((one * other).sum(dtype=torch.float64)) for one, other in zip(first, second, strict=True))


def _add(values: Sequence[Tensor], others: Sequence[Tensor], factor: float) -> None:
    for value, other in zip(values, others, strict=True):
        value.add_(other, alpha=factor)
