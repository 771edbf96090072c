"""Runs that tests of the Python functions share."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddpexp

NOISY = str(Path(__file__).parent / "noisy/conf")
OWN = ("--config-dir", NOISY, "recipe=noisy", "trainer.gpus=1", "logger=none")


@pytest.fixture(scope="module")
def surroundings(warm_environ: dict[str, str]) -> Iterator[None]:
    """What commands inherit from this process, as users have it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(warm_environ):
            patch.delenv(name)
        for name, value in warm_environ.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def trained(surroundings: None, tmp_path_factory: pytest.TempPathFactory) -> ddpexp.Run:
    """A run with two checkpoints, started from a thread, which has no interrupts."""
    folder, runs = tmp_path_factory.mktemp("trained"), []
    words = [*OWN, "trainer.keep_best=max:eval/loss", "trainer.ema_decay=0.5", "run.dir=run"]
    thread = threading.Thread(target=lambda: runs.append(ddpexp.run(words, cwd=folder, quiet=True)))
    thread.start()
    thread.join()
    return runs[0]
