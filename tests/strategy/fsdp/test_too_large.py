"""A model that does not fit into the memory of one worker, and does when it is sharded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PATIENCE, Ddpexp, finish
from tests.faults.harness import Ended
from tests.points import LARGE, Recipe

OVERRIDES = (
    "model._target_=points.Large", "~model.hidden", "~model.dropout", "optimizer=adamw", "trainer.gpus=4",
    "trainer.global_batch_size=8", "trainer.epochs=null", "trainer.max_steps=4", "trainer.checkpoint_every=2",
    "trainer.eval_every=2", "trainer.keep_last=1", "trainer.threads=1",
)  # fmt: skip
SHARDED = (
    "strategy=fsdp", "strategy.blocks=[Block]", "strategy.init=replay", "strategy.gather_in_evaluation=false"
)  # fmt: skip
LIMIT_KIB = 600_000
"""Of each process. Of it torch takes 200 to 260 MB; the rest of ddp is 540 MB and more, that of fsdp 200 MB."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("large"), environ), LARGE)


def limited(recipe: Recipe, *overrides: str, run: Path | None = None, fault: str = "") -> Ended:
    """Train with a limit on the memory of each process, and with an allocator that returns what is freed."""
    arguments, run = recipe.words(*OVERRIDES, *overrides, run=run)
    environ = {**recipe.ddpexp.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}
    process = subprocess.Popen(
        ["bash", "-c", f'ulimit -d {LIMIT_KIB} && exec "$0" "$@"', sys.executable, "-m", "ddpexp", *arguments],
        cwd=recipe.folder, env={**environ, "DDPEXP_FAULT": fault} if fault else environ, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    return Ended(finish(process, run, PATIENCE))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_too_large_for_a_worker_is_refused_by_plan_dies_by_name_and_trains_sharded(recipe: Recipe) -> None:
    plan = [*recipe.words(*OVERRIDES)[0], "--memory_gb=0.5"]
    refused = recipe.ddpexp("plan", *plan)
    assert (refused.code, "a rank needs 641 MB, more than --memory_gb=0.5" in refused.err) == (2, True), refused.err
    assert "try strategy=fsdp" in refused.err
    fits = recipe.ddpexp("plan", *plan, *SHARDED)
    assert fits.code == 0, fits.err

    replicas = limited(recipe)
    assert f"this shell allows {LIMIT_KIB:,} KiB of data (ulimit -d): raise that limit" in replicas.done.err
    assert replicas.error["phase"] == "train"
    replicas.failed(rank=replicas.error["rank"], says="can't allocate memory", step=False)

    killed = limited(recipe, *SHARDED, fault="checkpoint.renamed:kill:0:1")
    killed.failed(rank=0, says="SIGKILL")
    done = limited(recipe, *SHARDED, run=killed.done.run).done
    assert done.code == 0, done.err
    assert "resumed after step 2" in done.out
    undisturbed = recipe(*OVERRIDES)
    assert done.result()["weights_sha256"] == undisturbed.result()["weights_sha256"]
