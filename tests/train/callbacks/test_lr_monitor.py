"""The rates of all groups in the records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpexp.train.callbacks.lr_monitor import LRMonitor
from tests.refusals import refused
from tests.train.callbacks.test_hooks import fitting, points  # noqa: F401


def groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first], "lr": 0.5}, {"params": others}], lr=0.25)


@pytest.mark.parametrize(("every", "steps"), [(None, [4, 6]), (3, [3, 6])])
def test_every_group_is_recorded_with_other_settings(
    points: Any,  # noqa: F811
    tmp_path: Path,
    every: int | None,
    steps: list[int],
) -> None:
    loop, _, path = fitting(
        points, tmp_path, LRMonitor(every, ("betas", "weight_decay")), steps=6, eval_every=0, make=groups
    )
    loop.fit()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = [line for line in lines if "lr/optimizer/0" in line]
    assert [line["step"] for line in found] == steps
    for line in found:
        factor = loop.run.schedule.factor(line["step"] - 1, 6)
        assert line["lr/optimizer/0"] == pytest.approx(0.5 * factor)
        assert line["lr/optimizer/1"] == pytest.approx(0.25 * factor)
        assert (line["betas/optimizer/1/0"], line["betas/optimizer/0/1"]) == (0.9, 0.999)
        assert line["weight_decay/optimizer/0"] == 0.01


def test_a_setting_that_no_group_has_is_refused(points: Any, tmp_path: Path) -> None:  # noqa: F811
    loop, _, _ = fitting(points, tmp_path, LRMonitor(settings=("momentun",)))
    with refused("callbacks.c0.settings=[momentun]: momentum"):
        loop.fit()


@pytest.mark.parametrize(
    ("monitor", "warns"), [(LRMonitor(), True), (LRMonitor(2), False), (LRMonitor(None, ("lr",)), False)]
)
def test_rates_that_the_record_has_anyway_are_reported(
    points: Any,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monitor: LRMonitor,
    warns: bool,
) -> None:
    loop, _, _ = fitting(points, tmp_path, monitor, steps=1)
    loop.fit()
    assert [line.split(".")[:3] for line in caplog.messages if "train/lr" in line] == [
        ["callbacks", "c0 repeats the rates that every record has as train/lr", " For other steps set callbacks"]
    ] * warns
