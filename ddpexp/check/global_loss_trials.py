"""Trials of a loss over the global batch, from a task's `embed` and `loss`, for `ddpexp check`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ddpexp.check.subject import SEED, Subject
from ddpexp.errors import DdpexpError
from ddpexp.task import HasEmbed
from ddpexp.train.losses import are_named
from ddpexp.train.task_checks import named, split_batch

_FEWEST = 8  # samples of a batch whose loss is compared with that of a half
_MEAN_GROWS = 1.75  # times at most, from a half to the whole; a sum grows more than twice


def wrong_global_loss(subject: Subject, task: HasEmbed, batch: Any) -> list[str]:
    """Return the problems of a task's `embed` and `loss`, in evaluation.

    Rows of an `embed` that draws random numbers are not compared.

    Raises:
        DdpexpError: the batch has no parts.
    """
    halves = split_batch(batch, 2)
    if halves is None:
        raise DdpexpError("the batch cannot be split")
    with torch.no_grad():
        whole, again, *parts = (
            subject.copied(trains=False).embed(one, seed)
            for one, seed in ((batch, SEED), (batch, SEED + 1), (halves[0], SEED), (halves[1], SEED))
        )
        sums = [subject.copied(trains=False).loss(embedded) for embedded in (whole, parts[0])]
    problems = _mean_problem(named(task.loss), sums)
    rows, others = _tensors(whole), [torch.cat(parts) for parts in zip(*map(_tensors, parts), strict=True)]
    draws = any(not _agree(one, other, subject) for one, other in zip(rows, _tensors(again), strict=True))
    if not draws and any(not _agree(one, other, subject) for one, other in zip(rows, others, strict=True)):
        problems.append(
            f"{named(task.embed)} returns other rows for the same samples in smaller batches: the loss would depend on "
            "trainer.micro_batch_size and on the number of workers. Leave to `loss`, which gets the rows of the whole "
            "global batch, what compares samples or takes their mean."
        )
    return problems


def _mean_problem(source: str, sums: Sequence[Any]) -> list[str]:
    """Return the problem of a mean where a sum belongs, from what `loss` returns for a batch and for a half of it."""
    if any(map(are_named, sums)):
        return []
    (whole, count), (half, fewer) = ((float(loss), float(count)) for loss, count, _ in sums)
    is_mean = count >= _FEWEST and count == 2 * fewer and 0.5 < (whole / half if half else 0.0) < _MEAN_GROWS
    if not is_mean:
        return []
    return [
        f"{source} seems to return the mean of the loss, not its sum: {whole:.4g} over a count of {count:g}, and "
        f"{half:.4g} over {fewer:g} for half of the batch. The loop divides by the count itself, so the gradient is "
        f'{count:g} times too small: return the sum (reduction="sum"), or the mean times the count.'
    ]


def _tensors(embedded: Any) -> list[Tensor]:
    if isinstance(embedded, Tensor):
        return [embedded]
    return list(embedded.values() if isinstance(embedded, dict) else embedded)


def _agree(one: Tensor, other: Tensor, subject: Subject) -> bool:
    """Return whether two tensors are equal within rounding, which is relative to the largest value."""
    if one.shape != other.shape:
        return False
    one, other = one.double(), other.double()
    return bool(((one - other).abs() <= subject.tolerance * one.abs().amax()).all()) if one.numel() else True
