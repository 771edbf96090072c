"""A round of an optimizer step.

A count is a number, the same in every micro-batch, or a tensor. The total of tensors over the global batch is known
before the backward passes of a task with several losses; otherwise after the last one, and the sum of the gradients is
divided by it then.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from ddpexp.distributed.transfers import moved
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from ddpexp.strategy.mesh import DataRank
from ddpexp.train.counts import stack_counts


class Round:
    """The passes over micro-batches whose gradients add up, the counts of their losses, and who has used the sum.

    Attributes:
        begun: Passes over a micro-batch so far.
        is_reduced: Whether the pass that began last reduces the gradients.
        applied: The optimizers that have used the gradients.
        factors: The number of micro-batches divided by the count over the global batch, where that is a tensor and
            known before the backward passes, by the name of the loss.
        numbers: Counts that are numbers, of each micro-batch of this turn through them, by the name of the loss.
        tensors: Counts of this rank that are tensors, and whose total is not known yet, by the name of the loss.
    """

    begun = 0
    is_reduced = True
    applied: tuple[str, ...] = ()
    _had_numbers = False  # in earlier turns

    def __init__(self, caller: str) -> None:
        """Begin without gradients. `caller` is the function of the task that gives the counts, for errors."""
        self._caller = caller
        self.factors: dict[str, Tensor] = {}
        self.numbers: dict[str, int] = {}
        self.tensors: dict[str, list[Tensor]] = {}

    @property
    def has_numbers(self) -> bool:
        """Return whether any loss has a number as its count, also in earlier turns."""
        return self._had_numbers or bool(self.numbers)

    @property
    def has_counts(self) -> bool:
        """Return whether any loss has a count."""
        return self.has_numbers or bool(self.tensors)

    def begin_turn(self) -> None:
        """Begin another turn through the micro-batches, whose counts may differ from the last turn's."""
        self._had_numbers = self.has_numbers
        self.numbers.clear()
        self.factors = {}

    def add_tensor(self, count: Tensor, name: str, turn: int) -> None:
        """Note the count of a loss in a micro-batch of a turn through them. Units: turns, from 0.

        Raises:
            DdpexpError: other losses have numbers.
        """
        if self.has_numbers:
            raise self._mixed()
        self.tensors.setdefault(f"{name} of turn {turn}" if turn else name, []).append(count)

    def add_number(self, count: int, name: str) -> None:
        """Note a count that is a number, in a micro-batch.

        It is assumed to be the count of every micro-batch of the step on every rank: see `MetricAccumulator`.

        Raises:
            DdpexpError: it is not above 0 or has changed, or other losses have tensors whose total is not known.
        """
        expected = self.numbers.setdefault(name, count)
        if count != expected or self.tensors or not count > 0:
            raise self._wrong(count, expected)

    def _wrong(self, count: int, expected: int) -> DdpexpError:
        if not count > 0:
            return DdpexpError(
                f"{self._caller} gave the count {count}: a number counts for every micro-batch, and divides the loss",
                suggestion="Return a tensor if a micro-batch may have nothing to count.",
            )
        if count != expected:
            return DdpexpError(
                f"{self._caller} gave the count {count} after {expected}: a number counts for every micro-batch",
                suggestion="Return a tensor if the count depends on the data.",
            )
        return self._mixed()

    def _mixed(self) -> DdpexpError:
        return DdpexpError(
            f"{self._caller} gives numbers and tensors as counts for the same gradient: the value of a tensor is "
            "known only when the gradient is complete, and its parts cannot be divided any more",
            suggestion="Make all counts tensors, or all numbers.",
        )

    def gathered_counts(self, data: DataRank, world: World) -> tuple[Tensor, Tensor]:
        """Return the tensors of all ranks, and the names of their losses as numbers.

        Shapes: (num_counts,) fp64 each. Ranks: all; communicates.
        """
        counted = stack_counts([count for counts in self.tensors.values() for count in counts], world.device)
        names = [number_of(name) for name, counts in self.tensors.items() for _ in counts]
        each = counted.new_zeros(2, data.size, len(counted))
        if data.reports:
            each[:, data.rank] = torch.stack([counted, moved(torch.tensor(names, dtype=torch.float64), counted.device)])
        # Every data rank has a slot of its own, so that the sum has the same order everywhere.
        counts, numbers = world.sum(each).flatten(1)
        return counts, numbers


def number_of(name: str) -> int:
    """Return a number for a name that is the same on all ranks, and that fp64 can hold."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big")
