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

ARGUMENTS = (  # the arguments of torch's optimizers, of every version
    "lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "foreach", "differentiable", "fused",
    "betas", "eps", "amsgrad", "capturable", "decoupled_weight_decay", "rho", "lr_decay", "initial_accumulator_value",
    "alpha", "centered", "momentum_decay", "etas", "step_sizes", "lambd", "t0", "beta2_decay", "d", "ns_steps",
    "ns_coefficients", "adjust_lr_fn",
)  # fmt: skip


def check_optimizer(optimizer: Node) -> None:
    """Check the keys and the learning rate.

    Raises:
        RefusedError: a key is misspelt, or the rate is missing or no number.
    """
    _check_optimizer_keys(optimizer)
    rate = optimizer.kwargs.get("lr")
    if rate is None:
        raise RefusedError(
            "is missing: schedules multiply it, so every optimizer needs one",
            key="optimizer.lr",
            suggestion="Type it, for example optimizer.lr=0.01.",
        )
    if isinstance(rate, bool) or not isinstance(rate, float | int) or not 0 <= rate < math.inf:
        raise RefusedError(key="optimizer.lr", value=rate, suggestion="Use a number from 0, such as 0.05.")


def _check_optimizer_keys(optimizer: Node) -> None:
    """Refuse a key that is another name for one that torch's optimizers take; the rest is for the workers to see."""
    if not optimizer.target.startswith("torch.optim."):
        return
    for key in optimizer.kwargs:
        if key in ("beta1", "beta2"):
            raise RefusedError(
                "is not a known key", key=f"optimizer.{key}", suggestion="Did you mean optimizer.betas=[0.9,0.999]?"
            )
        misspelt = key not in ARGUMENTS and nearest(key, ARGUMENTS, 0.8) is not None
        if misspelt or (key not in ARGUMENTS and advice_on_key(key)):
            raise unknown_key(key, ARGUMENTS, "optimizer")


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
