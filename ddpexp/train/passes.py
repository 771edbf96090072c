"""The passes of a step without a `train_step` over its micro-batches, for a task that has one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from ddpexp.task import OptimizerStep, Sums


def passes(update: OptimizerStep, batches: Sequence[Any]) -> Sums:
    """Pass the micro-batches forward and backward; return their sums, added up. Ranks: all; communicates.

    Shapes: totals are fp64, so that records have the same bits at every number of micro-batches.
    """
    sums = []
    for number, batch in enumerate(batches, start=1):
        with update.micro_batch(last=number == len(batches)) as micro_batch:
            sums.append(micro_batch.forward(batch))
            micro_batch.backward(*sums[-1][:2])
    losses, counts, metrics = zip(*sums, strict=True)
    pairs = {name: ([one[name][0] for one in metrics], [one[name][1] for one in metrics]) for name in metrics[0]}
    return _total(losses), reduce(add, counts), {name: (_total(t), reduce(add, n)) for name, (t, n) in pairs.items()}


def _total(values: Iterable[Any]) -> Tensor:
    return reduce(add, (torch.as_tensor(value).detach().double() for value in values))
