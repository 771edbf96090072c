"""Runs that end before their last step, as configured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ddpexp.launch.workers.control import Control
from ddpexp.launch.workers.page import What
from ddpexp.train.loop import Loop
from ddpexp.train.metrics import Clock
from ddpexp.train.progress import TrainingProgress
from tests.conftest import Ddpexp
from tests.fitting import Kept, loop_alone, restore
from tests.points import Recipe


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Any:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("early"), environ)).module()


class EndsAfter(Control):
    """A command that ends the run after a step."""

    def __init__(self, step: int) -> None:
        super().__init__(None)
        self.last = step

    def poll(self, done: int, save: bool = False, end: bool = False) -> What | None:
        return "end" if done == self.last else None


def test_time_that_is_over_ends_the_run_and_a_larger_limit_continues_it(points: Any, tmp_path: Path) -> None:
    def trained(limit: float | None, step: int | None = None) -> Loop:
        control = Control(None, leads=True)
        loop, _ = loop_alone(points, tmp_path, points.Sides(), 10, control=control, max_seconds=limit)
        if step is not None:
            restore(loop, {"progress": asdict(TrainingProgress(step)), "clock": spent})
        return loop

    spent = {"train_seconds": 3.0, "elapsed_seconds": 7200.0, "since_record": 0.0}
    outcome = trained(1e-9).fit()
    assert (outcome.step, outcome.stopped) == (1, "trainer.max_seconds=1e-09 reached after step 1 of 10")
    assert outcome.elapsed_seconds > outcome.train_seconds > 0
    outcome = trained(7200, 4).fit()
    assert (outcome.step, outcome.stopped) == (4, "trainer.max_seconds=7200 reached after step 4 of 10")
    assert outcome.elapsed_seconds > 7200
    for limit in (7300, None):
        outcome = trained(limit, 4).fit()
        assert (outcome.step, outcome.stopped) == (10, None)
    assert trained(7200, 10).fit().stopped is None  # its steps are done


def test_the_time_of_earlier_starts_counts_from_the_start_on() -> None:
    clock, before = Clock(), {"train_seconds": 1.5, "elapsed_seconds": 2.5, "since_record": 0.5}
    clock.restore(before)
    clock.start()
    assert clock.state() == {name: pytest.approx(seconds, abs=0.1) for name, seconds in before.items()}
    assert clock.total() < clock.elapsed()


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
    kept = Kept()
    keys: dict[str, Any] = {"eval_every": every, "checkpoint_every": 0, "max_seconds": 7200}
    loop, records = loop_alone(points, tmp_path, points.Sides(), 10, control=EndsAfter(6), **keys)
    loop.checkpointer = kept
    outcome = loop.fit()
    reason = "trainer.max_seconds=7200 reached after step 6 of 10"
    assert (outcome.step, outcome.interrupted, outcome.stopped, outcome.digest) == (6, False, reason, "digest")
    assert kept.steps == [6]
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert [("train" if "train/loss" in line else "eval", line["step"]) for line in lines] == kinds
