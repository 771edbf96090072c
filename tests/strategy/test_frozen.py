"""Frozen parameters, late starts and parameter groups: the same bits in every strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpexp.errors import WorkerError
from ddpexp.launch import WorkerRequest
from ddpexp.launch.launchers.local import Spawn
from tests.conftest import calling


@pytest.mark.variants(1)
@pytest.mark.parametrize(("case", "size"), [("equal", 2), ("resumed", 2)])
def test_every_strategy_freezes_alike(case: str, size: int, tmp_path: Path, forked_servers: None) -> None:
    try:
        Spawn().launch(
            calling("tests.strategy.frozen:main", [case, str(size)], tmp_path / "logs", WorkerRequest(gpus=size))
        )
    except WorkerError as error:
        pytest.fail(f"{error.failure.message}\n{error.failure.traceback}")
