"""The progress of a run, what saves it, and where it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Outcome:
    """Where a run ended."""

    step: int
    epoch: float
    metrics: Mapping[str, float]  # of the last evaluation
    train_seconds: float  # without evaluations, over all starts
    elapsed_seconds: float  # with evaluations and saving, over all starts
    first_step_at: float  # Unix time when this start's first step was done
    interrupted: bool = False  # asked to stop before the last step
    digest: str | None = None  # weights_sha256 of the end. Ranks: rank zero
    stopped: str | None = None  # why the run ended before the last step, as configured: a sentence without full stop


@dataclass
class TrainState:
    """Progress of a run, as its checkpoints store it."""

    step: int = 0  # optimizer steps done
    evaluated: bool = True  # False: the evaluation after this step was interrupted and is still to be done
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    evaluated_at: int | None = None  # the step of the last evaluation
    best: list[float] = field(default_factory=list)  # best values so far of trainer.keep_best, the best first
    best_of: str | None = None  # the trainer.keep_best that they are of
    window: list[dict[str, Any]] = field(default_factory=list)  # sums of the steps since the last record
    train_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    schedule: dict[str, Any] = field(default_factory=dict)  # state of a schedule that has one
    averaged: int = 0  # with trainer.swa_start: how many values the average is the mean of


class Checkpointer(Protocol):
    """What saves checkpoints of a run."""

    def save(
        self, state: TrainState, optimizers: Mapping[str, Any], precision: Mapping[str, Any], epoch: float, end: bool
    ) -> str | None:
        """Save the run, with the state of its optimizers and of its gradient scale.

        At the `end` of the run return the hash of the weights.

        Ranks: all. Training may continue as soon as this returns; files are written asynchronously.
        """
        ...

    def check(self) -> None:
        """Re-raise a background write error, if there was one. Ranks: any."""
        ...

    def finish(self) -> None:
        """Wait until the last checkpoint is complete. Ranks: all."""
        ...
