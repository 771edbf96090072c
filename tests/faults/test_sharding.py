"""Ranks that die, fail or hang in the collectives of strategy=fsdp, and of a sharded optimizer."""

from __future__ import annotations

import pytest

from tests.faults.conftest import SOON
from tests.faults.harness import faulted
from tests.points import Recipe

CODE = """\
import torch.distributed as dist

from ddpexp.strategy.comm.gather import RowGather
from ddpexp.strategy.comm.shared_memory import SharedMemory
from ddpexp.strategy.fsdp import collectives
from ddpexp.system.fault_injection import fault_point

INSIDE = []


def point(owner, name, inside=None, where=None):
    # A fault point before a function that communicates; if it goes through shared memory, in its barrier.
    function = getattr(owner, name)

    def call(*args, **options):
        INSIDE.append(where)
        try:
            if not THROUGH_MEMORY:
                fault_point(where)
            return function(*args, **options)
        finally:
            INSIDE.pop()

    setattr(owner, name, call)


def barrier(self, function=SharedMemory.barrier):
    if INSIDE and THROUGH_MEMORY:
        fault_point(INSIDE[-1])
    function(self)


THROUGH_MEMORY = "strategy.reduce_through=backend" not in sys.orig_argv and os.environ.get("THROUGH") != "backend"
SharedMemory.barrier = barrier
if THROUGH_MEMORY:
    point(collectives.MemoryAllGather, "__call__", where="all_gather")
    point(collectives.MeanReduceScatter, "__call__", where="reduce_scatter")
else:
    for name in ("all_gather_single", "all_gather_into_tensor"):  # the latter with older versions of torch
        if hasattr(dist, name):
            point(dist, name, where="all_gather")
    point(dist, "all_to_all_single", where="reduce_scatter")
point(RowGather, "gather", where="rows")
"""
FSDP = ("strategy=fsdp", "strategy.min_block_mb=0.00001", "trainer.log_every=1", "trainer.epochs=4")
ROWS = ("strategy.shard_optimizer=true", "trainer.log_every=1", "trainer.epochs=4")
STRATEGIES = {"all_gather": FSDP, "reduce_scatter": FSDP, "rows": ROWS}
LATER = 9  # the visit, in the middle of a step after the first one


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What befalls ranks is tested, not how their fork server starts."""
    return warm_environ


@pytest.fixture
def recipe(recipe: Recipe) -> Recipe:
    with (recipe.folder / "points.py").open("a") as file:
        file.write(f"\n\n{CODE}")
    return recipe


ENDS = {
    "kill": r"SIGKILL: killed by SIGKILL",
    "abort": r"SIGABRT: killed by SIGABRT",
    "raise": r"RuntimeError: injected at ",
    "leave=0": r"SystemExit: the process ended with exit code 0",
    "stop": r"Hang: no progress for \d+ s \(trainer.timeout.step_seconds=4\): its process \d+ is stopped",
    "sleep": r"Hang: no progress for \d+ s \(trainer.timeout.step_seconds=4\): it waits in ",
    "spin": r"Hang: no progress for \d+ s \(trainer.timeout.step_seconds=4\): it is busy in ",
}


@pytest.mark.slow
@pytest.mark.fault(1, 3, 4, 5, 6, 19)
@pytest.mark.variants(1)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("action", ENDS)
@pytest.mark.parametrize("through", ["auto", "backend"])
@pytest.mark.parametrize("where", ["all_gather", "reduce_scatter", "rows"])
def test_a_rank_that_ends_or_hangs_in_a_collective_is_named(
    recipe: Recipe, where: str, through: str, action: str, workers: int
) -> None:
    rank = workers - 2  # the first or one in the middle
    overrides = (*STRATEGIES[where], f"strategy.reduce_through={through}", f"trainer.gpus={workers}", *SOON)
    # torch makes the folder of its compiler, which DTensor imports, and leaves it.
    environ = {"THROUGH": through, "TORCHINDUCTOR_CACHE_DIR": str(recipe.folder / "compiler")}
    ended = faulted(recipe, f"{where}:{action}:{rank}:{LATER}", *overrides, environ=environ)
    error = ended.failed(rank=rank, says=ENDS[action])
    assert error["phase"] == "train"
