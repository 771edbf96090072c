"""Checks of the optimizer section, before any worker starts."""

from __future__ import annotations

import math

from ddpexp.config.build import nearest, unknown_key
from ddpexp.config.foreign import advice_on_key
from ddpexp.config.registry import key_of
from ddpexp.config.schema import Experiment
from ddpexp.errors import RefusedError
from ddpexp.settings.node import Node
from ddpexp.settings.trainer import Trainer

_COMMON = ("lr", "weight_decay", "foreach", "maximize", "differentiable")
_ADAM = (*_COMMON, "betas", "eps", "capturable")
_ARGUMENTS = {  # of torch's optimizers, of every version
    "ASGD": (*_COMMON, "lambd", "alpha", "t0", "capturable"),
    "Adadelta": (*_COMMON, "rho", "eps", "capturable"),
    "Adafactor": ("lr", "beta2_decay", "eps", "d", "weight_decay", "foreach", "maximize"),
    "Adagrad": (*_COMMON, "lr_decay", "initial_accumulator_value", "eps", "fused"),
    "Adam": (*_ADAM, "amsgrad", "fused", "decoupled_weight_decay"),
    "AdamW": (*_ADAM, "amsgrad", "fused"),
    "Adamax": _ADAM,
    "Muon": ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
    "NAdam": (*_ADAM, "momentum_decay", "decoupled_weight_decay"),
    "RAdam": (*_ADAM, "decoupled_weight_decay"),
    "RMSprop": (*_COMMON, "alpha", "eps", "momentum", "centered", "capturable"),
    "Rprop": ("lr", "etas", "step_sizes", "capturable", "foreach", "maximize", "differentiable"),
    "SGD": (*_COMMON, "momentum", "dampening", "nesterov", "fused"),
    "SparseAdam": ("lr", "betas", "eps", "maximize"),
}  # fmt: skip
_ALL = tuple(dict.fromkeys(name for names in _ARGUMENTS.values() for name in names))


def arguments_of(target: str) -> tuple[str, ...] | None:
    """Return the arguments of an optimizer of torch; None if it is another one."""
    return _ARGUMENTS.get(target.removeprefix("torch.optim.")) if target.startswith("torch.optim.") else None


def check_optimizer(optimizer: Node) -> None:
    """Check the keys and the learning rate; a key that no optimizer of torch has is for the workers to see.

    Raises:
        RefusedError: a key is misspelt, or torch has it for other optimizers alone, such as betas that a recipe sets
            for Adam, under optimizer=sgd. The rate is missing or no number.
    """
    for key in optimizer.kwargs if optimizer.target.startswith("torch.optim.") else ():
        _check_key(key, optimizer.target)
    rate = optimizer.kwargs.get("lr")
    if rate is None:
        raise RefusedError(
            "is missing: schedules multiply it, so every optimizer needs one",
            key="optimizer.lr",
            suggestion="Type it, for example optimizer.lr=0.01.",
        )
    if isinstance(rate, bool) or not isinstance(rate, float | int) or not 0 <= rate < math.inf:
        raise RefusedError(key="optimizer.lr", value=rate, suggestion="Use a number from 0, such as 0.05.")


def _check_key(key: str, target: str) -> None:
    if key in ("beta1", "beta2"):
        raise RefusedError(
            "is not a known key", key=f"optimizer.{key}", suggestion="Did you mean optimizer.betas=[0.9,0.999]?"
        )
    accepted = arguments_of(target)
    if key not in _ALL and (nearest(key, _ALL, 0.8) is not None or advice_on_key(key)):
        raise unknown_key(key, _ALL, "optimizer")
    if key in _ALL and accepted is not None and key not in accepted:
        raise RefusedError(
            f"is not an argument of {target}",
            key=f"optimizer.{key}",
            suggestion=f"If the recipe sets it for another optimizer, remove it with ~optimizer.{key}. "
            f"Arguments: {', '.join(sorted(accepted))}.",
        )


def check_has_average(experiment: Experiment) -> None:
    """Check that there are averaged weights where trainer.average_batch_norm is set.

    Raises:
        RefusedError: there are none.
    """
    target = experiment.optimizer.target  # others may average the weights themselves, which the workers see
    ours = target.startswith("torch.optim.") or key_of("optimizer", target) is not None
    if experiment.trainer.average_batch_norm is not None and not experiment.trainer.averages and ours:
        raise no_average(experiment.trainer)


def no_average(trainer: Trainer) -> RefusedError:
    """Return the error for trainer.average_batch_norm without averaged weights."""
    return RefusedError(
        "is for averaged weights, and there are none",
        key="trainer.average_batch_norm",
        value=trainer.average_batch_norm,
        suggestion="Set trainer.ema_decay or trainer.swa_start, too.",
    )
