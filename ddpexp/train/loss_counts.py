"""Counts of several losses that are tensors, over the global batch and before the backward passes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddpexp.errors import DdpexpError
from ddpexp.strategy.options import Compilation
from ddpexp.system.text import counted
from ddpexp.task import HasCounts, HasTrainStep
from ddpexp.train.counts import factors_by_name
from ddpexp.train.losses import tensor_counts
from ddpexp.train.run import TrainingRun
from ddpexp.train.task_checks import is_number, named, shown
from ddpexp.train.task_step import function_of
from ddpexp.train.undo import on_copies


class LossCounts:
    """Adds up the counts of a step: by the task's `counts`, or by what its `step` returns.

    With one micro-batch a rank they are added up between forward and backward pass. With more, the others pass through
    the model once more, without gradients.

    Attributes:
        micro_batches: Those of this rank in the step in progress.
        is_ordered: Whether the step goes through them in their order.
        is_early: Whether `add_up` is called when a step begins, since not all ranks see what `step` returns.
        numbers: The losses whose counts are numbers, by the names of their records.
    """

    def __init__(self, run: TrainingRun, seed: Callable[[int], None]) -> None:
        """Look at the task once; `seed` seeds the random numbers of one of this rank's micro-batches."""
        self._run = run
        self._seed = seed
        self._counts = run.task.counts if isinstance(run.task, HasCounts) else None
        self.micro_batches: Sequence[Any] = []
        self.is_ordered = not isinstance(run.task, HasTrainStep)
        self.is_early = self._counts is not None and run.strategy.returns_on_last_stage
        self._known: dict[str, Tensor] = {}  # factors by what the task's `counts` returns for some micro-batches
        self._known_for: Sequence[Any] = []  # those
        self._is_reported = False
        self.numbers: set[str] = set()

    def factors(self, counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the factors of the losses, given the counts of the first micro-batch of a turn: see `Round.factors`.

        Ranks: all; communicates, unless that was done when the step began.

        Raises:
            DdpexpError: the task must have such a method.
        """
        if self._counts is not None:
            return self.from_batches()
        run = self._run
        num_more = len(self.micro_batches) - 1
        if run.strategy.returns_on_last_stage:
            raise _counts_wanted(counts, "strategy=pipeline computes the losses on its last stage alone")
        if num_more and not self.is_ordered:
            raise _counts_wanted(
                counts,
                "a train_step that does not call update.backward(batches) goes through several micro-batches in an "
                "order of its own",
            )
        if run.options.compile_step:
            raise _counts_wanted(counts, "trainer.compile_step=true computes it in the same graph as the losses")
        if num_more and Compilation.records_graphs(run.options):
            raise _counts_wanted(counts, "the graphs of trainer.compile hold the results of one micro-batch at a time")
        if run.world.is_rank_zero and not self._is_reported:
            passes = f"{counted(num_more, 'more forward pass')} without gradients, and " if num_more else ""
            logging.getLogger("ddpexp").info(
                f"the losses {_listed(counts)} have counts that depend on the data: to know them over the global batch "
                f"takes {passes}one small reduction a step"
                f"{'; a method counts(batch) of the task saves the passes' if num_more else ''}"
            )
        self._is_reported = True
        return self._added_up([counts, *self._counts_ahead()])

    def add_up(self, micro_batches: list[Any]) -> None:
        """Add up the counts of a step before it. Ranks: all; communicates."""
        self.from_batches()

    def from_batches(self) -> dict[str, Tensor]:
        """Return the factors by what the task's `counts` returns. Ranks: all; communicates once a step."""
        assert self._counts is not None
        if self._known_for is not self.micro_batches:
            self._known = self._added_up([_counts_of(batch, self._counts) for batch in self.micro_batches])
            self._known_for = self.micro_batches
        return self._known

    def check_equal(self, batch: Any, counts: Mapping[str, Tensor]) -> None:
        """Check that the task's `counts` returns what its `step` does for a micro-batch.

        Raises:
            DdpexpError: another number.
        """
        if self._counts is None:
            return
        for name, count in _counts_of(batch, self._counts).items():
            returned = float(counts[name]) if name in counts else float(count)
            if not math.isclose(returned, float(count), rel_tol=1e-2):
                raise DdpexpError(
                    f"returned {float(count):g} as the count of {name!r}, and the step {returned:g}, for the same "
                    "batch: the gradient is divided by the former, and what is recorded by the latter",
                    suggestion="Return the same count; where it does not follow from the batch alone, leave out the "
                    "method counts.",
                    place=named(self._counts),
                )

    def check_names(self, counts: Mapping[str, Any], factors: Mapping[str, Any]) -> None:
        """Check that every loss of a micro-batch whose count is a tensor is among those that were added up.

        Raises:
            DdpexpError: one is not.
        """
        missing = [name for name in counts if name not in factors]
        if not missing:
            return
        source = function_of(self._run.task) if self._counts is None else self._counts
        raise DdpexpError(
            f"returned a tensor as the count of {_listed(factors) or 'no loss'}, and the step has the losses "
            f"{_listed(counts)}, whose counts must be known over the global batch before the first backward pass",
            suggestion="Return the same losses for every batch, with a count of 0 where there is nothing to count.",
            place=named(source),
        )

    def _counts_ahead(self) -> list[dict[str, Tensor]]:
        """Return the counts of this rank's micro-batches after the first, from forward passes without effects."""
        if len(self.micro_batches) == 1:
            return []
        run = self._run
        found = []
        with torch.no_grad(), on_copies(run.strategy.modules, run.world.device):
            for number, batch in enumerate(self.micro_batches[1:], start=1):
                self._seed(number)
                losses: Any = run.task_step(run.strategy.train_model, batch)[0]
                found.append(tensor_counts(losses))
        return found

    def _added_up(self, counts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        for micro_batch in counts[1:]:
            self.check_names(counts[0], micro_batch)
        return factors_by_name(counts, self._run.strategy.data, self._run.world)


def _counts_of(batch: Any, counts: Callable[[Any], Any]) -> dict[str, Tensor]:
    """Return what a task's `counts` returns for a batch. Raises: DdpexpError, if it is something else than counts."""
    returned = counts(batch)
    if not isinstance(returned, Mapping) or not all(map(is_number, returned.values())):
        raise DdpexpError(
            f"returned {shown(returned)}, where {{name: count}} belongs: one number for each loss whose count is a "
            "tensor",
            place=named(counts),
        )
    return {name: torch.as_tensor(count).detach() for name, count in returned.items()}


def _counts_wanted(counts: Mapping[str, Any], reason: str) -> DdpexpError:
    return DdpexpError(
        f"the losses {_listed(counts)} have tensors as counts, which must be known over the global batch before the "
        f"first backward pass, and {reason}",
        suggestion="Give the task a method counts(self, batch) that returns {name: count}, or return counts that are "
        "numbers: docs/several_losses.md.",
    )


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, names))
