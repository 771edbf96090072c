"""Totals over the global batch of counts that are tensors, which are known only after its last micro-batch.

A call of backward has a place: see `ddpexp.train.round`. The counts of each place are added up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddpexp.distributed.transfers import is_host, moved
from ddpexp.errors import DdpexpError


class GlobalCounts:
    """By what gradients are multiplied for the totals of the counts, which must be equal for every place."""

    def __init__(self, caller: str) -> None:
        """`caller` is the function of the task that gives the counts, for errors."""
        self._caller = caller
        self._unchecked: list[Tensor] = []  # totals on the device. Shapes: (num_counts,) each, NaN after the last

    def factor(self, counts: Tensor, places: Tensor, global_batch_size: int) -> Tensor:
        """Return the global batch size divided by the total, or 0 if nothing was counted, as in a batch of padding.

        Does not wait for a GPU: whether the totals are equal is then seen by `check`.
        Shapes: (num_counts,) fp64 each, of all ranks; returns a scalar on their device.

        Raises:
            DdpexpError: the totals of several places differ.
        """
        if is_host(counts.device):
            totals = totals_on_host(counts, places)
            self._check(totals)
            return torch.tensor(global_batch_size / totals[0] if totals[0] else 0.0, dtype=torch.float64)
        on_device = totals_on_device(counts, places)
        self._unchecked.append(on_device)
        return torch.where(on_device[0] != 0, global_batch_size / on_device[0], 0.0)

    def check(self) -> None:
        """Check the totals since the last call. The host waits for the device if there are any.

        Raises:
            DdpexpError: those of several places differ.
        """
        if self._unchecked:
            parts = torch.split(torch.cat(self._unchecked).cpu(), [len(totals) for totals in self._unchecked])
            self._unchecked.clear()
            for totals in parts:
                self._check(totals[~totals.isnan()].tolist())

    def _check(self, totals: Sequence[float]) -> None:
        if any(total != totals[0] for total in totals[1:]):
            shown = ", ".join(f"{total:g}" for total in totals)
            raise DdpexpError(
                f"{self._caller} calls backward with tensors that count {shown} over the global batch: these "
                "counts are known only when all gradients are added up, and the sum cannot be divided by several "
                "counts",
                suggestion="Call it once with the sum of the losses, weighted as you mean it, or give counts "
                "that are numbers.",
            )


def totals_on_host(counts: Tensor, places: Tensor) -> list[float]:
    """Return the sum of the counts of each place, in the order of the places."""
    return [float(counts[places == place].cumsum(0)[-1]) for place in torch.unique(places)]


def totals_on_device(counts: Tensor, places: Tensor) -> Tensor:
    """Return the same, then NaN, without a number that the host has to know. Shapes: (num_counts,)."""
    places, order = places.sort(stable=True)
    number = torch.zeros_like(places, dtype=torch.int64)  # of each place
    torch.cumsum(places[1:] != places[:-1], 0, out=number[1:])
    totals = torch.zeros_like(counts).index_add_(0, number, counts.index_select(0, order))
    return totals.where(torch.arange(len(totals), device=totals.device) <= number[-1], torch.nan)


def stack_counts(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return counts as one tensor of float64 on the device."""
    if len({(value.dtype, value.device) for value in values}) == 1:
        return moved(torch.stack(list(values)).to(torch.float64), device)  # one conversion for all
    return torch.stack([moved(value.to(torch.float64), device) for value in values])
