"""A sweep that has really run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpexp.sweep.folder import Record, SweepDir, job_name
from tests.conftest import Ddpexp
from tests.points import Recipe

JOBS = (
    ["optimizer.lr=0.1", "model.hidden=4"],
    ["optimizer.lr=0.5", "model.hidden=8"],
    ["optimizer.lr=0.1", "task._target_=points.Bad"],
)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Path:
    """The directory of a sweep of three real runs, the last of which fails; the record has lost its last event."""
    ddpexp = Ddpexp(tmp_path_factory.mktemp("trained"), environ)
    bad = "class Bad(Sides):\n    def step(self, model, batch):\n        raise ValueError('no\\x1b[31m luck')\n"
    recipe = Recipe(ddpexp, bad)
    sweep = SweepDir(ddpexp.folder / "sweep")
    sweep.path.mkdir()
    record = Record(sweep)
    record.add("sweep", words=["-m"], slots=1, kind="cpu", objective="eval/loss", mode="min")
    names = [job_name(number, words) for number, words in enumerate(JOBS)]
    for number, words in enumerate(JOBS):
        record.add("planned", job=number, name=names[number], overrides=words)
    for number, words in enumerate(JOBS):
        record.add("started", job=number, attempt=1, slots=[0], gpus=[])
        done = recipe(*words, "logger=tensorboard", "trainer.gpus=1", run=sweep.path / "run")
        assert done.code == (1 if number == 2 else 0), done.err
        done.run.rename(sweep.path / names[number])
        if number < 2:
            record.add("ended", job=number, status="done", exit_code=0, seconds=1.0, objective=None, message=None)
    record.close()
    return sweep.path
