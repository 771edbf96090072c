"""The memory that a plan adds up, against that of the workers of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Ddpexp
from tests.points import LARGE, Recipe

CODE = f"""\
from pathlib import Path


{LARGE}

class Measured(Sides):
    # Records the most memory that this process has had.
    def step(self, model, batch):
        lines = Path("/proc/self/status").read_text().splitlines()
        kib = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
        Path(os.environ["DDPEXP_TEST_PEAKS"], str(RANK)).write_text(kib)
        return super().step(model, batch)
"""
COMMON = (
    "task._target_=points.Measured", "~model.hidden", "~model.dropout", "optimizer=adamw", "trainer.gpus=4",
    "trainer.global_batch_size=8", "trainer.epochs=null", "trainer.max_steps=4", "trainer.checkpoint_every=2",
    "trainer.eval_every=2", "trainer.keep_last=1", "trainer.threads=1", "data.test=8",
)  # fmt: skip
STRATEGIES = {
    "fsdp": ("strategy=fsdp", "strategy.blocks=[Block]"),
    "fsdp, never whole": (
        "strategy=fsdp", "strategy.blocks=[Block]", "strategy.init=replay", "strategy.gather_in_evaluation=false",
    ),
    "shard_optimizer": ("strategy=ddp", "strategy.shard_optimizer=true"),
    "ddp": ("strategy=ddp",),
}  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("measured"), environ), CODE)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_plan_is_within_a_tenth_of_what_four_workers_take(name: str, recipe: Recipe, tmp_path: Path) -> None:
    large, small = (
        (*COMMON, *STRATEGIES[name], "model._target_=points.Large", f"+model.width={width}", f"+model.blocks={blocks}")
        for width, blocks in ((1024, 12), (4, 1))  # 100 million parameters, and none to speak of
    )
    planned = json.loads(recipe.ddpexp("plan", "--json", *recipe.words(*large)[0]).out)
    parts = {part["name"]: part["num_bytes"] for part in planned["memory"]["parts"]}
    most = max(planned["memory"]["rank_bytes"], *planned["memory"]["moments"].values(), 0)
    assert planned["parameters"] > 100e6
    peaks = []
    for number, overrides in enumerate((large, small)):
        folder = tmp_path / str(number)
        folder.mkdir()
        environ = {"MALLOC_MMAP_THRESHOLD_": "1048576", "DDPEXP_TEST_PEAKS": str(folder)}
        done = recipe(*overrides, environ=environ, timeout=600)
        assert done.code == 0, done
        peaks.append(max(int(path.read_text()) * 1024 for path in folder.iterdir()))
    taken = peaks[0] - peaks[1]
    assert taken == pytest.approx(most, rel=0.1), (taken, most, parts)
