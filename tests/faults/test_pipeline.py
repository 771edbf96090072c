"""Ranks that die, fail or hang in a stage, in what they send the next one, and in the sums of a tensor group."""

from __future__ import annotations

import pytest

from tests.faults.conftest import SOON
from tests.faults.harness import faulted
from tests.faults.test_sharding import ENDS
from tests.points import Recipe

CODE = """\
import torch.distributed as dist

from ddpexp.strategy.pipeline.passes import StageModel
from ddpexp.strategy.tensor.group import TensorGroup
from ddpexp.system.fault_injection import fault_point


def point(owner, name, where):
    # A fault point before a function.
    function = getattr(owner, name)

    def call(*args, **options):
        fault_point(where)
        return function(*args, **options)

    setattr(owner, name, call)


point(StageModel, "__call__", "stage")
point(dist, "isend", "send")
point(dist, "irecv", "receive")
point(TensorGroup, "add_up", "tensor_sum")
"""
MESH = (
    "strategy=pipeline", "strategy.tp_size=2", "trainer.gpus=4", "trainer.micro_batch_size=6", "trainer.log_every=1",
    "trainer.epochs=4", 'strategy.tp_plan=[{match:"0",style:colwise},{match:"3",style:rowwise}]',
)  # fmt: skip
INTERLEAVED = (
    "strategy=pipeline", "strategy.schedule=interleaved", "strategy.stages_per_worker=2", "trainer.gpus=2",
    "trainer.micro_batch_size=6", "trainer.log_every=1", "trainer.epochs=4",
)  # fmt: skip
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


@pytest.mark.slow
@pytest.mark.fault(1, 3, 4, 5, 6, 19)
@pytest.mark.variants(1)
@pytest.mark.parametrize("action", [*(one for one in ENDS if one == "sleep"), *(one for one in ENDS if one != "sleep")])
@pytest.mark.parametrize(
    ("where", "rank"), [("tensor_sum", 2), ("send", 1), ("stage", 0), ("stage", 3), ("receive", 3), ("send", 2)]
)
def test_a_rank_that_ends_or_hangs_between_the_stages_is_named(
    recipe: Recipe, where: str, rank: int, action: str
) -> None:
    # torch makes the folder of its compiler, which DTensor imports, and leaves it.
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(recipe.folder / "compiler")}
    ended = faulted(recipe, f"{where}:{action}:{rank}:{LATER}", *MESH, *SOON, environ=environ)
    assert ended.failed(rank=rank, says=ENDS[action])["phase"] == "train"


@pytest.mark.slow
@pytest.mark.fault(1, 3, 4, 5, 6, 19)
@pytest.mark.parametrize("action", ENDS)
@pytest.mark.parametrize("where", ["send", "receive", "stage"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_an_interleaved_pipeline_that_ends_or_hangs_is_named(
    recipe: Recipe, where: str, rank: int, action: str
) -> None:
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(recipe.folder / "compiler")}
    ended = faulted(recipe, f"{where}:{action}:{rank}:{2 * LATER}", *INTERLEAVED, *SOON, environ=environ)
    assert ended.failed(rank=rank, says=ENDS[action])["phase"] == "train"
