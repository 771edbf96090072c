"""A rank that waits for cores says so, once."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from torch.nn.functional import cross_entropy

from ddpexp.train import core_wait
from tests.conftest import Ddpexp
from tests.fitting import fit_alone
from tests.points import Recipe


@pytest.mark.parametrize(
    ("ran", "waited", "load", "said"),
    [
        (10, 90, 11.4, "waited for a core 90% of the time that it could have run (load average 11.4, 2 cores usable)"),
        (10, 90, 1.5, None),  # it has got better
        (50, 50, 11.4, None),
        (0, 0, 11.4, None),
    ],
)
def test_most_of_the_time_at_a_high_load_is_a_hint(ran: int, waited: int, load: float, said: str | None) -> None:
    found = core_wait.hint(ran, waited, load, 2)
    assert found is None if said is None else said in str(found)


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory, warm_environ: dict[str, str]) -> Any:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("points"), warm_environ)).module()


class Task:
    def step(self, model: Any, batch: Any) -> Any:
        _, rows, labels = batch
        return cross_entropy(model(rows), labels, reduction="sum"), len(labels), {}


def test_a_run_says_once_that_it_waits(
    points: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("DDPEXP_HINTS")
    (tmp_path / "schedstat").write_text("1000 9000 12\n")
    monkeypatch.setattr(core_wait, "_SCHEDULED", tmp_path / "schedstat")
    monkeypatch.setattr(os, "getloadavg", lambda: (4000.0, 0.0, 0.0))
    monkeypatch.setattr(logging.getLogger("ddpexp"), "propagate", True)
    with caplog.at_level(logging.INFO, "ddpexp"):
        fit_alone(points, tmp_path, Task())
    assert sum("waited for a core 90%" in record.getMessage() for record in caplog.records) == 1
