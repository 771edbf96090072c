"""Optimizers of two algorithms, each for the parameters that it is made for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ddpexp.errors import RefusedError
from ddpexp.train.param_groups import Described

ALGORITHM = "algorithm"  # the key of a parameter group that names its algorithm
_EMBEDDINGS = frozenset(("Embedding", "EmbeddingBag"))


class Combined(Optimizer):
    """An optimizer whose groups are updated by the algorithms that they name.

    To strategies, schedules and checkpoints it is one optimizer with one state.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], algorithms: Mapping[str, Callable[..., Optimizer]]) -> None:
        """Build an optimizer for the groups of each algorithm; all share their groups and their state with this one."""
        groups = list(groups)
        self._inner = {
            name: build(chosen)
            for name, build in algorithms.items()
            if (chosen := [group for group in groups if group[ALGORITHM] == name])
        }
        built = {name: iter(inner.param_groups) for name, inner in self._inner.items()}
        super().__init__([next(built[group[ALGORITHM]]) for group in groups], {})
        self.defaults = {key: value for inner in self._inner.values() for key, value in inner.defaults.items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter with its gradient."""
        for name, inner in self._inner.items():
            # Anew each time: restoring a checkpoint, or dividing the state among ranks, replaces both.
            inner.state = self.state
            inner.param_groups = [group for group in self.param_groups if group[ALGORITHM] == name]
            inner.step()


def muon(  # noqa: PLR0913  (an argument for each key of the configuration)
    params: Any,
    lr: float,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = "match_rms_adamw",
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
    adamw: Sequence[str] = (),
) -> Combined:
    """Return Muon for matrices in hidden layers and AdamW for the rest; `adamw` is read by `divide_for`.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is
    Scalable for LLM Training", 2025.
    """
    return Combined(params, {
        "muon": lambda groups: torch.optim.Muon(
            groups, lr, weight_decay, momentum, nesterov, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn
        ),
        "adamw": lambda groups: torch.optim.AdamW(groups, lr, (betas[0], betas[1]), eps, weight_decay),
    })  # fmt: skip


def sparse_adam(
    params: Any, lr: float, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
) -> Combined:
    """Return SparseAdam for parameters with sparse gradients and AdamW for the rest."""
    return Combined(params, {
        "sparse_adam": lambda groups: torch.optim.SparseAdam(groups, lr, (betas[0], betas[1]), eps),
        "adamw": lambda groups: torch.optim.AdamW(groups, lr, (betas[0], betas[1]), eps, weight_decay),
    })  # fmt: skip


def divide_for(
    target: str, keys: Mapping[str, Any], described: Mapping[int, Described], models: Mapping[str, nn.Module]
) -> dict[int, str]:
    """Return the algorithm of each parameter by its identity; nothing if `target` is no combined optimizer.

    Raises:
        RefusedError: the optimizer is not for this model.
    """
    if target == "muon":
        patterns = [str(pattern) for pattern in keys.get("adamw", ())]
        algorithms = {key: "muon" if _is_hidden(one, patterns) else "adamw" for key, one in described.items()}
        if "muon" not in algorithms.values():
            raise RefusedError(
                "trains matrices of hidden layers, but the model has none",
                key="optimizer",
                value="muon",
                suggestion="Use optimizer=adamw, or shorten the list optimizer.adamw.",
            )
        return algorithms
    if target == "sparse_adam":
        sparse = {id(layer.weight) for model in models.values() for layer in model.modules() if is_sparse(layer)}
        if not sparse:
            raise RefusedError(
                "needs sparse gradients, but no layer of the model has them",
                key="optimizer",
                value="sparse_adam",
                suggestion="Build its embeddings with sparse=True, or use optimizer=adamw.",
            )
        return {key: "sparse_adam" if key in sparse else "adamw" for key in described}
    return {}


def divided(groups: Iterable[dict[str, Any]], algorithms: Mapping[int, str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each group, or its part for each algorithm, with the number of the group."""
    for number, group in enumerate(groups):
        parameters = group["params"]
        members = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        parts: dict[str, list[Any]] = {}
        for parameter in members:
            # What no model has, such as a parameter of a task, is AdamW's.
            algorithm = algorithms.get(id(parameter), "adamw") if algorithms else ""
            parts.setdefault(algorithm, []).append(parameter)
        for algorithm, part in parts.items():
            yield number, {**group, "params": part, **({ALGORITHM: algorithm} if algorithm else {})}


def _is_hidden(parameter: Described, patterns: Sequence[str]) -> bool:
    named = any(fnmatchcase(name, pattern) for name in parameter.names for pattern in patterns)
    return parameter.ndim == 2 and not (parameter.types & _EMBEDDINGS) and not named


def is_sparse(layer: nn.Module) -> bool:
    """Return whether the weight of a layer gets sparse gradients."""
    return isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
