"""Several losses in one step, each the mean of its own count: what `ddpexp.task.Task.step` returns by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from ddpexp.task import Loss, NamedSums, Pair, Sums

PREFIX = "loss/"
"""Of the names under which the losses are recorded."""


def are_named(sums: Any) -> bool:
    """Return whether a step has returned several losses by name, rather than the sum and the count of one."""
    return isinstance(sums, tuple | list) and len(sums) == 2 and isinstance(sums[0], Mapping)


def weights_of(losses: Mapping[str, Loss]) -> dict[str, float]:
    """Return the weights of the losses as numbers, by the names of their records."""
    return {PREFIX + name: torch.as_tensor(loss[2]).item() if len(loss) == 3 else 1.0 for name, loss in losses.items()}


def pairs_of(losses: Mapping[str, Loss]) -> dict[str, Pair]:
    """Return what is recorded of the losses: their sums and counts, without weights."""
    return {f"{PREFIX}{name}": (loss[0], loss[1]) for name, loss in losses.items()}


def losses_of(sums: Sums | NamedSums) -> dict[str, Pair]:
    """Return the sum and the count of each loss that a step has returned, by the name of its record."""
    return {"loss": (sums[0], sums[1])} if len(sums) == 3 else pairs_of(sums[0])


def tensor_counts(losses: Mapping[str, Loss]) -> dict[str, Tensor]:
    """Return the counts that are tensors, by the name of the loss."""
    return {name: loss[1].detach() for name, loss in losses.items() if isinstance(loss[1], Tensor)}


def combined(losses: Mapping[str, Loss], factors: Mapping[str, Tensor]) -> Tensor:
    """Return one loss of a micro-batch, whose mean over the micro-batches is the sum of the means of all losses.

    `factors` holds, for counts that are tensors, the number of micro-batches divided by the total. Shapes: scalars.
    """
    parts = []
    for name, loss in losses.items():
        total, count = loss[:2]
        dtype = torch.float64 if total.dtype == torch.float64 else torch.float32
        factor = factors[name].to(dtype) if isinstance(count, Tensor) else 1 / count
        part = total.to(dtype) * factor
        parts.append(part * loss[2] if len(loss) == 3 else part)
    return reduce(add, parts)
