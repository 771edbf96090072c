"""Healthy runs on a machine that has more work than cores, with timeouts of one second: none is ended."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.launch.starters import SPAWN, STARTERS, skip_without
from tests.points import ITEMS, Recipe

MINUTES = float(os.environ.get("DDPEXP_TEST_SOAK_MINUTES", "3"))
SECOND = ("trainer.timeout.step_seconds=1", "trainer.timeout.save_seconds=1", "trainer.timeout.data_seconds=1")
HERE = (
    "trainer.timeout.init_seconds=1",
)  # by one command alone: several start as far apart as the machine has them start
WORDS = ("trainer.log_every=1", "trainer.epochs=10", "trainer.checkpoint_every=5", "trainer.eval_every=3")
KINDS = [  # how it is started, the number of ranks, its overrides
    ("spawn", 2, HERE),
    ("spawn", 3, (*HERE, *ITEMS)),
    ("spawn", 2, (*HERE, "trainer.micro_batch_size=4")),
    ("spawn", 4, (*HERE, "trainer.reduction=exact", "trainer.micro_batch_size=3")),
    ("spawn", 3, (*HERE, "strategy.reduce_through=backend")),
    ("torchrun", 2, ()),
    ("variables in shells", 2, ()),
    ("MPICH", 2, ()),
]


@pytest.fixture
def _busy() -> Iterator[None]:
    """Four processes that compute, beside whatever else there is."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    yield
    for process in busy:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.fault(5)
@pytest.mark.timeout(60 * MINUTES + 600)
@pytest.mark.usefixtures("_busy")
def test_no_healthy_run_is_ended(recipe: Recipe) -> None:
    starters = {str(one): one for one in (SPAWN, *STARTERS)}
    end, ended = time.monotonic() + 60 * MINUTES, Counter[str]()
    for name, size, overrides in itertools.cycle(KINDS):
        skip_without(starters[name])
        done = starters[name](recipe, size, *WORDS, *SECOND, *overrides, timeout=600)
        assert done.code == 0, f"after {ended}: {name} {overrides}\n{done.err}"
        assert done.result()["status"] == "done"
        ended[name] += 1
        if time.monotonic() > end:
            break
    print(f"{ended.total()} runs in {MINUTES:g} min: {dict(ended)}")
