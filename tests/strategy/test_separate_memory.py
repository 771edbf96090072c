"""Whole runs of every strategy on a device with a memory of its own: nothing of the CPU's goes into a collective.

See `tests.apart`, which stands for a GPU and NCCL.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.apart.device import library
from tests.apart.group import LIBRARY
from tests.conftest import ROOT, Ddpexp
from tests.points import Recipe
from tests.strategy.test_whole_runs import AVERAGED, CODE, COMMON, NORMED, SCALED, SKIPS, WAYS

EXACT = ("trainer.reduction=exact", "trainer.deterministic=true")
FSDP, PIPELINE = WAYS["fsdp"].overrides, WAYS["pipeline"].overrides
RUNS: Mapping[str, tuple[str, ...]] = {
    **{name: way.overrides if way.numbers == "other" else (*way.overrides, *SKIPS) for name, way in WAYS.items()},
    "ddp": SKIPS,
    "ddp, fp16": SCALED,
    "ddp, batch norm": NORMED,
    "ddp, compressed": ("strategy.comm_hook=fp16", AVERAGED),
    "ddp, small buckets": ("strategy.bucket_cap_mb=0.0001", "trainer.deterministic=true", AVERAGED),
    "ddp, static graph": ("strategy.static_graph=true", "trainer.global_batch_size=24", "trainer.micro_batch_size=auto"),
    "ddp, unused parameters": ("strategy.find_unused_parameters=true", AVERAGED),
    "ddp, exact": (*EXACT, *NORMED),
    "fsdp, batch norm": (*FSDP, *NORMED),
    "fsdp, exact": (*FSDP, *EXACT, *SKIPS),
    "fsdp, offload": (*FSDP, "strategy.offload=true", AVERAGED),
    "hybrid, exact": (*WAYS["hybrid"].overrides, *EXACT),
    "pipeline, sharded": (*PIPELINE, "strategy.dp_shard_size=2", "strategy.gather_in_evaluation=false", AVERAGED),
}  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environ(plain_environ: dict[str, str]) -> dict[str, str]:
    return {**plain_environ, "PYTHONPATH": f"{ROOT / 'tests/apart'}:{ROOT}", LIBRARY: str(library())}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("apart"), environ), CODE)


@pytest.mark.parametrize("name", RUNS)
def test_steps_saves_resumes_and_ends_communicate_what_is_on_the_device(name: str, recipe: Recipe) -> None:
    overrides = (*COMMON, *RUNS[name])
    whole = recipe(*overrides)
    assert whole.code == 0, whole
    assert "4 GPU workers" in whole.out
    stopped = recipe(*overrides, environ={"DDPEXP_FAULT": "evaluate:term:1:2"})
    assert stopped.code == 143, stopped
    resumed = recipe(*overrides, run=stopped.run)
    assert resumed.code == 0, resumed
    assert resumed.result()["weights_sha256"] == whole.result()["weights_sha256"]
