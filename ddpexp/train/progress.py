"""How far a run is, and where it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ddpexp.system.secrets import masked_tree


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
    tested: int | None = None  # the step whose weights the set `test` was evaluated with
    stopped: str | None = None  # why the run ended before the last step, as configured: a sentence without full stop


@dataclass
class TrainingProgress:
    """How far a run is, as its checkpoints store it."""

    step: int = 0  # optimizer steps done
    evaluated: bool = True  # False: the evaluation after this step was interrupted and is still to be done
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    evaluated_at: int | None = None  # the step of the last evaluation
    best: list[float] = field(default_factory=list)  # best values so far of trainer.keep_best, the best first
    best_of: str | None = None  # the trainer.keep_best that they are of
    tested: int | None = None  # the step whose weights the set `test` was evaluated with

    def state(self) -> dict[str, Any]:
        """Return the fields, without secrets in texts."""
        return {**asdict(self), "metrics": masked_tree(self.metrics)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Set the fields to what `state` returned."""
        for name in self.__dataclass_fields__:
            setattr(self, name, saved.get(name) if name == "tested" else saved[name])
