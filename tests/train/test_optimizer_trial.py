"""Trial steps: which optimizers of users may be divided among ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.strategy.on_ranks import works
from tests.train import trial_optimizers as mine

SUMS = " updates a parameter differently when other parameters have no gradient: "


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (mine.Signs, ""), (mine.Modes, ""), (mine.Wide, ""), (mine.OwnRate, SUMS), (mine.LargestFirst, SUMS),
        (mine.Noise, SUMS), (mine.Lists, " keeps lists, mappings or objects in its state (bases), but strategy=fsdp "),
    ],
)  # fmt: skip
def test_optimizers_that_need_all_parameters_are_refused(kind: type[mine.Signs], expected: str) -> None:
    found = mine.refusal(kind, mine.net())
    assert found.startswith(f"optimizer._target_=mine.{kind.__name__}{expected}" if expected else "")
    assert bool(found) == bool(expected), found


def test_torchs_own_are_not_tried() -> None:
    summing: Any = type("OwnRate", (mine.OwnRate,), {"__module__": "torch.optim.own_rate"})
    assert mine.refusal(summing, mine.net()) == ""


def test_optimizers_that_do_not_work_with_some_rows_are_refused(tmp_path: Path, forked_servers: None) -> None:
    works("tests.train.trial_optimizers", "dtensors", 2, tmp_path / "logs")
