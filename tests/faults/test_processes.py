"""Ranks that fail, die, hang or leave early: who did it, said once, in time."""

from __future__ import annotations

import pytest

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
