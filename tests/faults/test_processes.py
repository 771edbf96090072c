"""Ranks that fail, die, hang or leave early: who did it, said once, in time."""

from __future__ import annotations

import pytest

from tests.faults.conftest import SOON
from tests.faults.harness import faulted
from tests.points import Recipe

EVERY = ("trainer.gpus=2", "trainer.log_every=1", "trainer.epochs=4")


@pytest.mark.fault(1, 2)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_is_shown_once_with_its_traceback(recipe: Recipe, rank: int) -> None:
    ended = faulted(recipe, f"forward:raise:{rank}:5", *EVERY)
    error = ended.failed(rank=rank, within=8, says="RuntimeError: injected at forward")
    assert error["step"] == 4
    assert "faults.py" in error["traceback"]


@pytest.mark.fault(5, 6)
@pytest.mark.parametrize(
    ("fault", "phase", "says"),
    [
        ("forward:stop:1:5", "train", r"Hang: no progress for \d s \(trainer.timeout.step_seconds=2\): its process \d+ is stopped"),
        ("backward:spin:0:5", "train", r"Hang: .*: it is busy in _train_step \(.*/loop.py:\d+\), and the others wait"),
        ("step:sleep:1:5", "train", r"Hang: .*: it waits in fit "),
        ("data:sleep:0:5", "data", r"Hang: .*\(trainer.timeout.data_seconds=2\): it waits in "),
        ("evaluate:stop:1:1", "evaluate", r"Hang: .*stopped"),
        ("save:sleep:1:1", "save", r"Hang: .*\(trainer.timeout.save_seconds=3\): it waits in "),
    ],
)
def test_a_rank_that_hangs_is_named_with_its_phase_in_time(recipe: Recipe, fault: str, phase: str, says: str) -> None:
    rank = int(fault.split(":")[2])
    ended = faulted(recipe, fault, *EVERY, *SOON)
    error = ended.failed(rank=rank, within=15, says=says)
    assert error["phase"] == phase
    other = (ended.done.run / "ranks" / f"{1 - rank}.log").read_text()
    assert "most recent call first" in other
