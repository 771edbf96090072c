"""Runs that end before their last step, as configured."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ddpexp.train.loop import Loop
from ddpexp.train.state import TrainState
from tests.conftest import Ddpexp
from tests.fitting import loop_alone
from tests.points import Recipe


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Any:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("early"), environ)).module()


@dataclass
class Kept:
    """Stands for what saves checkpoints: keeps the state of each."""

    saved: list[TrainState]

    def save(self, state: TrainState, optimizers: Any, precision: Any, epoch: float, end: bool) -> str | None:
        self.saved.append(replace(state, window=list(state.window)))
        return "digest" if end else None

    def check(self) -> None:
        """Nothing goes wrong."""

    def finish(self) -> None:
        """Everything is written."""


def ends_after(loop: Loop, step: int) -> None:
    """Let the loop end after a step, as a callback would."""
    run = loop._step.run

    def run_and_end(number: int, micro_batches: list[Any]) -> Any:
        if number + 1 == step:
            loop.stopped = "enough"
        return run(number, micro_batches)

    loop._step.run = run_and_end  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize(
    ("every", "kinds"),
    [
        (4, [("train", 4), ("eval", 4), ("train", 6), ("eval", 6)]),
        (6, [("train", 4), ("eval", 6), ("train", 6)]),
        (0, [("train", 4), ("train", 6)]),
    ],
)
def test_an_early_end_is_saved_recorded_and_evaluated_like_the_last_step(
    points: Any, tmp_path: Path, every: int, kinds: list[tuple[str, int]]
) -> None:
    kept = Kept([])
    loop, records = loop_alone(points, tmp_path, points.Sides(), 10, eval_every=every, checkpoint_every=0)
    loop.checkpointer = kept
    ends_after(loop, 6)
    outcome = loop.fit()
    assert (outcome.step, outcome.interrupted, outcome.stopped, outcome.digest) == (6, False, "enough", "digest")
    assert [state.step for state in kept.saved] == [6]
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert [("train" if "train/loss" in line else "eval", line["step"]) for line in lines] == kinds
