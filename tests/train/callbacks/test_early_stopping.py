"""Early stopping: what counts as an improvement, and when the run ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from ddpexp.errors import RefusedError
from ddpexp.train.callbacks.early_stopping import EarlyStopping
from ddpexp.train.keep_best import check_monitor, unknown_monitor
from tests.train.callbacks.test_hooks import fitting, points  # noqa: F401

NAN = math.nan


def stops_after(values: Sequence[float], **keys: Any) -> tuple[int | None, str]:
    """Return the evaluation after which the run ends, from 1, and the reason."""
    stopping = EarlyStopping(**keys)
    reasons: list[str] = []
    for number, value in enumerate(values, start=1):
        run: Any = SimpleNamespace(step=10 * number, stop=reasons.append)
        stopping.on_evaluated(run, {"eval/loss": value})
        if reasons:
            return number, reasons[0]
    return None, ""


@pytest.mark.parametrize(
    ("values", "patience", "min_delta", "mode", "expected"),
    [
        ([3, 2, 1, 0.5], 1, 0.0, "min", None),
        ([3, 2, 2, 1, 1], 2, 0.0, "min", None),  # equal is no improvement, but the next one is
        ([3, 2, 2, 2], 2, 0.0, "min", 4),
        ([3, 2.95, 2.9, 2.85], 3, 0.1, "min", None),
        ([3, 2.95, 2.92, 2.91], 3, 0.1, "min", 4),
        ([1, 2, 1, 1], 2, 0.0, "max", 4),
        ([NAN, NAN, 1.0, 2.0], 3, 0.0, "min", None),
        ([1, NAN, NAN], 2, 0.0, "min", 3),
        ([math.inf, 5, 4], 1, 0.0, "min", None),
    ],
)
def test_when_it_ends(
    values: list[float], patience: int, min_delta: float, mode: Literal["min", "max"], expected: int | None
) -> None:
    assert stops_after(values, patience=patience, min_delta=min_delta, mode=mode)[0] == expected


def test_the_reason_has_the_numbers() -> None:
    assert stops_after([3, 2, 2.5, 2.25], patience=2)[1] == (
        "eval/loss has not improved for 2 evaluations: 2 at step 20, 2.25 at step 40"
    )
    assert stops_after([3, 2.95], patience=1, min_delta=0.1)[1] == (
        "eval/loss has not improved by more than 0.1 for 1 evaluation: 3 at step 10, 2.95 at step 20"
    )
    assert stops_after([NAN], patience=1)[1] == "eval/loss has not improved for 1 evaluation: nan at step 10"


def test_the_metric_is_checked_at_the_start_and_after_the_first_step(points: Any, tmp_path: Path) -> None:  # noqa: F811
    for monitor, message in [
        (
            "validation/loss",
            "callbacks.c0.monitor=validation/loss names the evaluation set validation, but the data has",
        ),
        ("eval/acuracy", "it has eval/loss, eval/accuracy. Did you mean callbacks.c0.monitor=eval/accuracy?"),
    ]:
        loop, _, _ = fitting(points, tmp_path, EarlyStopping(monitor=monitor))
        with pytest.raises(RefusedError) as caught:
            loop.fit()
        assert message in str(caught.value)
        assert loop.progress.step == (monitor == "eval/acuracy")


def test_refusals_name_the_key() -> None:
    key = "callbacks.early_stopping.monitor"
    for metric, sets, every, message in [
        ("eval/loss", ["eval"], 0, f"{key}=eval/loss needs evaluations, and trainer.eval_every=0 makes none."),
        ("eval/loss", [], 5, f"{key}=eval/loss needs evaluations, and the data has no evaluation set. "),
        ("loss", ["eval"], 5, f"{key}=loss: use a metric of an evaluation set, such as eval/loss."),
        ("evl/loss", ["eval", "more"], 5, f"but the data has only eval, more. Did you mean {key}=eval/loss?"),
    ]:
        with pytest.raises(RefusedError) as caught:
            check_monitor(key, metric, sets, every)
        assert message in str(caught.value)
    assert str(unknown_monitor(key, "eval/los", ["eval/loss"])).endswith(f"Did you mean {key}=eval/loss?")
