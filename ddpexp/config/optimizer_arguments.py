"""The arguments of torch's optimizers, so that one of another optimizer is refused before any worker starts."""

from __future__ import annotations

from ddpexp.errors import RefusedError
from ddpexp.settings.node import Node

_COMMON = ("lr", "weight_decay", "foreach", "maximize", "differentiable")
_ADAM = (*_COMMON, "betas", "eps", "capturable")
_ARGUMENTS = {
    "ASGD": (*_COMMON, "lambd", "alpha", "t0", "capturable"),
    "Adadelta": (*_COMMON, "rho", "eps", "capturable"),
    "Adafactor": ("lr", "beta2_decay", "eps", "d", "weight_decay", "foreach", "maximize"),
    "Adagrad": (*_COMMON, "lr_decay", "initial_accumulator_value", "eps", "fused"),
    "Adam": (*_ADAM, "amsgrad", "fused", "decoupled_weight_decay"),
    "AdamW": (*_ADAM, "amsgrad", "fused"),
    "Adamax": _ADAM,
    "LBFGS": (
        "lr", "max_iter", "max_eval", "tolerance_grad", "tolerance_change", "history_size", "line_search_fn",
    ),
    "Muon": ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
    "NAdam": (*_ADAM, "momentum_decay", "decoupled_weight_decay"),
    "RAdam": (*_ADAM, "decoupled_weight_decay"),
    "RMSprop": (*_COMMON, "alpha", "eps", "momentum", "centered", "capturable"),
    "Rprop": ("lr", "etas", "step_sizes", "capturable", "foreach", "maximize", "differentiable"),
    "SGD": (*_COMMON, "momentum", "dampening", "nesterov", "fused"),
    "SparseAdam": ("lr", "betas", "eps", "maximize"),
}  # fmt: skip
_ALL = {name for names in _ARGUMENTS.values() for name in names}


def arguments_of(target: str) -> tuple[str, ...] | None:
    """Return the arguments of an optimizer of torch; None if it is another one."""
    return _ARGUMENTS.get(target.removeprefix("torch.optim.")) if target.startswith("torch.optim.") else None


def check_arguments(optimizer: Node) -> None:
    """Refuse an argument that torch has for other optimizers alone; one that none here has is for the workers to see.

    Raises:
        RefusedError: there is one, such as betas that a recipe sets for Adam, under optimizer=sgd.
    """
    accepted = arguments_of(optimizer.target)
    if accepted is None:
        return
    for key in optimizer.kwargs:
        if key in _ALL and key not in accepted:
            raise RefusedError(
                f"is not an argument of {optimizer.target}",
                key=f"optimizer.{key}",
                suggestion=f"If the recipe sets it for another optimizer, remove it with ~optimizer.{key}. "
                f"Arguments: {', '.join(sorted(accepted))}.",
            )
