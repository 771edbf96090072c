"""The order in which a worker does the forward and backward passes of a step's micro-batches. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Schedule = Literal["1f1b", "gpipe", "interleaved"]


@dataclass(frozen=True)
class Pass:
    """A pass of one micro-batch through the layers of a stage."""

    micro_batch: int
    forward: bool
    stage: int


@dataclass(frozen=True)
class Pipe:
    """The workers through which a micro-batch passes, and their stages: worker `p` has `p`, `p + size` and so on."""

    size: int  # workers
    stages_per_worker: int = 1

    @property
    def num_stages(self) -> int:
        """Return the number of all stages."""
        return self.size * self.stages_per_worker

    def stages_of(self, place: int) -> range:
        """Return the stages of a worker, which is the one with this place in the pipe."""
        return range(place, self.num_stages, self.size)


def order(schedule: Schedule, place: int, pipe: Pipe, num_micro_batches: int) -> list[Pass]:
    """Return the passes of a worker in a step. In each stage both kinds go through the micro-batches in their order.

    With several stages a worker does as many micro-batches as there are workers with one stage, then with the next.

    Source: Huang et al., "GPipe", 2019; Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN
    training", 2019 (one forward, one backward); Narayanan et al., "Efficient large-scale language model training on GPU
    clusters using Megatron-LM", 2021 (interleaved).
    """
    ahead = num_in_flight(schedule, place, pipe, num_micro_batches)
    num_passes = num_micro_batches * pipe.stages_per_worker
    passes = [_numbered(number, place, pipe, forward=True) for number in range(ahead)]
    for number in range(num_passes):
        passes.append(_numbered(number, place, pipe, forward=False))
        if ahead + number < num_passes:
            passes.append(_numbered(ahead + number, place, pipe, forward=True))
    return passes


def num_in_flight(schedule: Schedule, place: int, pipe: Pipe, num_micro_batches: int) -> int:
    """Return of how many forward passes a worker keeps the activations at most; each is one of a single stage."""
    num_passes = num_micro_batches * pipe.stages_per_worker
    if schedule == "gpipe":
        return num_passes
    if pipe.stages_per_worker == 1:
        return min(pipe.size - place, num_passes)
    return min((pipe.size - place - 1) * 2 + (pipe.stages_per_worker - 1) * pipe.size + 1, num_passes)


def _numbered(number: int, place: int, pipe: Pipe, forward: bool) -> Pass:
    """Return the pass of a worker that is the `number`-th of its kind."""
    if pipe.stages_per_worker == 1:
        return Pass(number, forward, place)
    turn, rest = divmod(number, pipe.num_stages)
    local, within = divmod(rest, pipe.size)
    stages = pipe.stages_of(place)
    return Pass(turn * pipe.size + within, forward, stages[local] if forward else stages[-1 - local])
