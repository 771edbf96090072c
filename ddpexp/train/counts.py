"""Totals over the global batch of counts that are tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ddpexp.distributed.transfers import is_host, moved
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from ddpexp.strategy.mesh import DataRank


class GlobalCounts:
    """By what gradients are multiplied for totals that are known after the backward passes, equal for all losses."""

    def __init__(self, caller: str) -> None:
        """`caller` is the function of the task that gives the counts, for errors."""
        self._caller = caller
        self._unchecked: list[Tensor] = []  # totals on the device. Shapes: (num_counts,) each, NaN after the last

    def factor(self, counts: Tensor, names: Tensor, global_batch_size: int) -> Tensor:
        """Return the global batch size divided by the total, or 0 if nothing was counted, as in a batch of padding.

        Does not wait for a GPU: whether the totals are equal is then seen by `check`.
        Shapes: (num_counts,) fp64 each, of all ranks, `names` as in `Round.gathered_counts`; returns a scalar on their
        device.

        Raises:
            DdpexpError: the totals of several losses differ.
        """
        if is_host(counts.device):
            totals = totals_on_host(counts, names)
            self._check(totals)
            return torch.tensor(global_batch_size / totals[0] if totals[0] else 0.0, dtype=torch.float64)
        on_device = totals_on_device(counts, names)
        self._unchecked.append(on_device)
        return torch.where(on_device[0] != 0, global_batch_size / on_device[0], 0.0)

    def check(self) -> None:
        """Check the totals since the last call. The host waits for the device if there are any.

        Raises:
            DdpexpError: those of several losses differ.
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
                suggestion="Call it once with the sum of the losses, weighted as you mean it, or return the losses by "
                "their names from the task's step: docs/several_losses.md.",
            )


def totals_on_host(counts: Tensor, names: Tensor) -> list[float]:
    """Return the sum of the counts of each name, in the order of the numbers that stand for names."""
    return [float(counts[names == name].cumsum(0)[-1]) for name in torch.unique(names)]


def totals_on_device(counts: Tensor, names: Tensor) -> Tensor:
    """Return the same, then NaN, without a number that the host has to know. Shapes: (num_counts,)."""
    names, order = names.sort(stable=True)
    number = torch.zeros_like(names, dtype=torch.int64)  # of each name
    torch.cumsum(names[1:] != names[:-1], 0, out=number[1:])
    totals = torch.zeros_like(counts).index_add_(0, number, counts.index_select(0, order))
    return totals.where(torch.arange(len(totals), device=totals.device) <= number[-1], torch.nan)


def stack_counts(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return counts as one tensor of float64 on the device."""
    if len({(value.dtype, value.device) for value in values}) == 1:
        return moved(torch.stack(list(values)).to(torch.float64), device)  # one conversion for all
    return torch.stack([moved(value.to(torch.float64), device) for value in values])


def factors_by_name(counts: Sequence[Mapping[str, Tensor]], data: DataRank, world: World) -> dict[str, Tensor]:
    """Return the number of micro-batches of the global batch divided by the total of each named count, 0 for none.

    Every micro-batch has a slot of its own, so that the totals have the same order everywhere.
    Shapes: `counts` has an entry for each micro-batch of this rank; scalars, the returned ones fp64 on the device.
    Ranks: all, with the same names; communicates once.
    """
    names = sorted(counts[0])
    table = torch.zeros(len(names), data.size, len(counts), dtype=torch.float64, device=world.device)
    if data.reports:
        own = stack_counts([micro_batch[name] for name in names for micro_batch in counts], world.device)
        table[:, data.rank] = own.view(len(names), len(counts))
    slots = world.sum(table).flatten(1)
    totals = slots.cumsum(1)[:, -1]
    factors = torch.where(totals != 0, slots.shape[1] / totals, 0.0)
    return dict(zip(names, factors.unbind(), strict=True))
