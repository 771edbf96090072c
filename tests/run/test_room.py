"""What a start says of the disk: to the byte."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ddpexp.run.directory import RunDir
from ddpexp.train.disk_space import check_disk_space
from tests.conftest import Ddpexp
from tests.fitting import TRAINER, loop_alone
from tests.points import Recipe
from tests.refusals import refused

PARAMETERS = 58
WANTED = 2 * PARAMETERS * 4  # the weights and SGD's momentum, in fp32


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """Whether there is room is tested, not how fork servers start."""
    return warm_environ


class Disk:
    """A file system with so much left."""

    def __init__(self, num_bytes: int) -> None:
        self.f_bavail, self.f_frsize, self.f_files, self.f_favail = (
            num_bytes,
            1,
            0,
            0,
        )  # some file systems count no files


@pytest.fixture
def points(tmp_path: Path, environ: dict[str, str]) -> Any:
    return Recipe(Ddpexp(tmp_path, environ)).module()


@pytest.mark.parametrize(
    ("free", "is_refused", "warned"),
    [(WANTED - 1, True, False), (WANTED, False, True), (3 * WANTED - 1, False, True), (3 * WANTED, False, False)],
)
def test_a_start_is_refused_where_not_even_one_checkpoint_fits(
    points: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    free: int, is_refused: bool, warned: bool,
) -> None:  # fmt: skip
    run = RunDir(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    (tmp_path / "records").mkdir()
    loop, _ = loop_alone(points, tmp_path / "records", points.Sides())
    monkeypatch.setattr(os, "statvfs", lambda _: Disk(free))
    try:
        if is_refused:
            with refused(f"{free} bytes free"):
                check_disk_space(run, TRAINER, loop)
        else:
            check_disk_space(run, TRAINER, loop)
    finally:
        loop.logger.close()
    assert ("saving will fail later" in caplog.text) == warned
