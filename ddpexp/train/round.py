"""A round of an optimizer step.

A count is a number, the same in every micro-batch, or a tensor, whose total is known only after the last one. A call of
`backward` has a place: the turn through the micro-batches, and its position among the calls of its micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddpexp.distributed.transfers import moved
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from ddpexp.strategy.mesh import DataRank
from ddpexp.train.counts import stack_counts

_MAX_CALLS = 1 << 20  # of backward in a micro-batch


class Round:
    """The passes over micro-batches whose gradients add up, the counts of their losses, and who has used the sum.

    Attributes:
        begun: Passes over a micro-batch so far.
        is_reduced: Whether the pass that began last reduces the gradients.
        applied: The optimizers that have used the gradients.
        tensors: Counts that are tensors.
        places: The place of each of them, as one number.
        numbers: Counts that are numbers, of this turn by position.
        has_numbers: Whether there are any, also in earlier turns.
    """

    def __init__(self, caller: str) -> None:
        """Begin without gradients. `caller` is the function of the task that gives the counts, for errors."""
        self.begun = 0
        self.is_reduced = True
        self.applied: tuple[str, ...] = ()
        self.tensors: list[Tensor] = []
        self.places: list[int] = []
        self.has_numbers = False
        self.numbers: dict[int, int] = {}
        self._caller = caller

    @property
    def has_counts(self) -> bool:
        """Return whether any loss has a count."""
        return self.has_numbers or bool(self.tensors)

    def begin_turn(self) -> None:
        """Begin another turn through the micro-batches; its numbers may differ from the last turn's."""
        self.numbers.clear()

    def add_tensor(self, count: Tensor, turn: int, position: int) -> None:
        """Note the count of a call of `backward`.

        Raises:
            DdpexpError: other calls gave numbers.
        """
        if self.has_numbers:
            raise self._mixed()
        self.tensors.append(count)
        self.places.append(turn * _MAX_CALLS + position)

    def add_number(self, count: int, position: int) -> None:
        """Note a count that is a number, in the first micro-batch of a turn.

        It is assumed to be the count of every micro-batch of the step on every rank: see `MetricAccumulator`.

        Raises:
            DdpexpError: it is not above 0 or has changed, or other calls gave tensors.
        """
        if not count > 0:
            raise DdpexpError(
                f"{self._caller} gave the count {count}: a number counts for every micro-batch, and divides the loss",
                suggestion="Return a tensor if a micro-batch may have nothing to count.",
            )
        expected = self.numbers.setdefault(position, count)
        if count != expected:
            raise DdpexpError(
                f"{self._caller} gave the count {count} after {expected}: a number counts for every micro-batch",
                suggestion="Return a tensor if the count depends on the data.",
            )
        if self.tensors:
            raise self._mixed()
        self.has_numbers = True

    def _mixed(self) -> DdpexpError:
        return DdpexpError(
            f"{self._caller} gives numbers and tensors as counts for the same gradient: the value of a tensor is "
            "known only when the gradient is complete, and its parts cannot be divided any more",
            suggestion="Make all counts tensors, or all numbers.",
        )

    def gathered_counts(self, data: DataRank, world: World) -> tuple[Tensor, Tensor]:
        """Return the tensors of all ranks with their places. Ranks: all; communicates.

        Shapes: (num_counts,) fp64 each.
        """
        counted = stack_counts(self.tensors, world.device)
        places = moved(torch.tensor(self.places, dtype=torch.float64), counted.device)
        each = counted.new_zeros(2, data.size, len(counted))
        if data.reports:
            each[:, data.rank] = torch.stack([counted, places])
        # Every data rank has a slot of its own, so that the sum has the same order everywhere.
        counts, places = world.sum(each).flatten(1)
        return counts, places
