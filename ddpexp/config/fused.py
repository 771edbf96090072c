"""Whether an optimizer of torch updates all parameters in one kernel: `optimizer.fused`, free of torch.

With `auto` the first start of a run decides, and its manifest keeps that: a fused optimizer rounds in another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpexp.config.schema import Experiment
from ddpexp.errors import RefusedError
from ddpexp.settings.node import Node

KEY = "optimizer.fused"
AUTO = "auto"
_FUSED = ("torch.optim.SGD", "torch.optim.Adam", "torch.optim.AdamW")
_EXCLUDES = ("foreach", "differentiable", "dampening")  # arguments with which torch's default stays


def without_auto(optimizer: Node) -> Node:
    """Return an optimizer whose `fused` is not `auto`, where that is torch's default."""
    return Node(optimizer.target, {k: v for k, v in optimizer.kwargs.items() if k != "fused" or v != AUTO})


def for_target(optimizer: Node) -> Node:
    """Return an optimizer without the `auto` of the option that it was made of, if its class is another one.

    Raises:
        RefusedError: the value is neither a truth, null nor auto.
    """
    value = optimizer.kwargs.get("fused")
    if optimizer.target not in _FUSED:
        return without_auto(optimizer)
    if value is not None and value != AUTO and not isinstance(value, bool):
        raise RefusedError(key=KEY, value=value, suggestion="Use auto, true, false or null.")
    return optimizer


def resolve(experiment: Experiment, device: str, before: Mapping[str, Any] | None) -> dict[str, bool]:
    """Return the value of `optimizer.fused` by its key, if it is auto.

    It is that of the first start, of which `before` is the manifest, and for a new run whether its workers have GPUs.
    """
    given = experiment.optimizer.kwargs
    if given.get("fused") != AUTO:
        return {}
    if before is not None:
        return {KEY: is_fused(experiment.optimizer, before)}
    return {
        KEY: device == "cuda"
        and not experiment.strategy.updates_on_host
        and not any(given.get(name) for name in _EXCLUDES)
        and given.get("foreach") is None
    }


def is_fused(optimizer: Node, manifest: Mapping[str, Any]) -> bool:
    """Return the value of `optimizer.fused=auto` that a manifest records; false if there is none."""
    resolved = manifest.get("resolved")
    return optimizer.kwargs.get("fused") == AUTO and isinstance(resolved, Mapping) and resolved.get(KEY) is True
