"""The order in which a stage does the forward and backward passes of a step's micro-batches. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Schedule = Literal["1f1b", "gpipe"]


@dataclass(frozen=True)
class Pass:
    """A pass of one micro-batch through the layers of a stage."""

    micro_batch: int
    forward: bool


def order(schedule: Schedule, stage: int, num_stages: int, num_micro_batches: int) -> list[Pass]:
    """Return the passes of a stage in a step. Both kinds go through the micro-batches from the first to the last.

    Source: Huang et al., "GPipe", 2019; Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN
    training", 2019 (one forward, one backward).
    """
    ahead = num_in_flight(schedule, stage, num_stages, num_micro_batches)
    passes = [Pass(number, forward=True) for number in range(ahead)]
    for number in range(num_micro_batches):
        passes.append(Pass(number, forward=False))
        if ahead + number < num_micro_batches:
            passes.append(Pass(ahead + number, forward=True))
    return passes


def num_in_flight(schedule: Schedule, stage: int, num_stages: int, num_micro_batches: int) -> int:
    """Return of how many micro-batches a stage keeps the activations at most."""
    return num_micro_batches if schedule == "gpipe" else min(num_stages - stage, num_micro_batches)
