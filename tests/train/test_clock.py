"""The speed that is recorded is that of the training alone, on a clock that only the task's own work moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.fitting import Once
from tests.train.test_loop import fit, points, recipe

__all__ = ["fit", "points", "recipe"]  # its fixtures

TRAIN_SECONDS, EVAL_SECONDS = 2.0, 64.0


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the loop's clock shows, in a list of one."""
    shown = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: shown[0])
    return shown


@pytest.mark.parametrize("eval_every", [0, 1, 2, 3, "epoch"])
def test_the_recorded_speed_leaves_evaluations_out(
    points: Any, fit: Callable[..., Once], now: list[float], eval_every: int | str
) -> None:
    class Works(points.Sides):  # type: ignore[misc]
        def step(self, model: Any, batch: Any) -> Any:
            now[0] += TRAIN_SECONDS if model.training else EVAL_SECONDS
            return super().step(model, batch)

    once = fit(Works(), num_steps=10, log_every=3, eval_every=eval_every)
    speeds = {one["step"]: one["train/samples_per_second"] for one in once.records if "train/samples_per_second" in one}
    assert speeds == dict.fromkeys((3, 6, 9, 10), 24 / TRAIN_SECONDS)
