"""Runs that tests of the Python functions share."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ddpexp

NOISY = str(Path(__file__).parent / "noisy/conf")
OWN = ("--config-dir", NOISY, "recipe=noisy", "trainer.gpus=1", "logger=none")


@contextmanager
def replaced_variables(environ: dict[str, str]) -> Iterator[None]:
    """Have commands inherit these variables from this process, and no others."""
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(environ):
            patch.delenv(name)
        for name, value in environ.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def surroundings(warm_environ: dict[str, str]) -> Iterator[None]:
    """The environment of a user, in this process."""
    with replaced_variables(warm_environ):
        yield


@pytest.fixture(scope="session")
def trained(warm_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> ddpexp.Run:
    """A run with two checkpoints, started from a thread, which has no interrupts. Tests leave it as it is."""
    folder, runs = tmp_path_factory.mktemp("trained"), []
    words = [*OWN, "trainer.keep_best=max:eval/loss", "trainer.ema_decay=0.5", "run.dir=run"]
    with replaced_variables(warm_environ):
        thread = threading.Thread(target=lambda: runs.append(ddpexp.run(words, cwd=folder, quiet=True)))
        thread.start()
        thread.join()
    return runs[0]
