"""Compiled blocks with every strategy: the weights of strategy=ddp, one compilation, and checkpoints of either."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.conftest import Ddpexp
from tests.points import Recipe
from tests.strategy.on_ranks import works
from tests.strategy.test_sharded_optimizer import files

CODE = """\
class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm, self.layer, self.dropout = nn.BatchNorm1d(width), nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, rows):
        return rows + self.dropout(torch.relu(self.layer(self.norm(rows))))


class Deep(nn.Sequential):
    def __init__(self, hidden=16, dropout=0.2):
        super().__init__(nn.Linear(4, hidden), *(Block(hidden, dropout) for _ in range(4)), nn.Linear(hidden, 2))
"""
COMMON = (
    "model._target_=points.Deep", "model.dropout=0.2", "optimizer=adamw", "trainer.gpus=2", "trainer.threads=1",
    "trainer.micro_batch_size=6", "trainer.clip_grad_norm=0.1", "trainer.log_every=1",
)  # fmt: skip
COMPILED = (*COMMON, "trainer.compile=true", "trainer.compile_blocks=Block")
SHARDED = ("strategy=fsdp", "strategy.blocks=[Block]")
ONCE = "torch.compile: 1 compiled, 0 compiled again"


@pytest.mark.slow
def test_divided_models_have_the_weights_of_replicas_with_the_same_blocks_compiled(
    tmp_path: Path, forked_servers: None
) -> None:
    works("tests.strategy.compiled", "two_workers", 2, tmp_path / "logs")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, warm_environ: dict[str, str]) -> Recipe:
    torchs_own = "ignore:The .grad attribute of a Tensor that is not a leaf"  # of torch's own access
    environ = {**warm_environ, "PYTHONWARNINGS": f"error::UserWarning,{torchs_own}"}
    return Recipe(Ddpexp(tmp_path_factory.mktemp("compiled"), environ), CODE)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("trainer.reduction=exact",)])
def test_checkpoints_are_those_of_replicas_and_either_strategy_resumes_the_other(
    recipe: Recipe, more: tuple[str, ...]
) -> None:
    whole = recipe(*COMPILED, *more)
    assert whole.code == 0, whole
    assert ONCE in whole.out
    run = recipe.ddpexp.folder / f"in turn {len(more)}"
    for steps, words in ((3, SHARDED), (6, ("strategy=ddp",)), (8, (*SHARDED, "strategy.init=replay"))):
        done = recipe(*COMPILED, *more, *words, f"trainer.max_steps={steps}", run=run)
        assert done.code == 0, done
        assert ONCE in done.out
    assert files(run) == files(whole.run)
    assert done.result()["weights_sha256"] == whole.result()["weights_sha256"]


@pytest.mark.slow
def test_a_checkpoint_from_before_is_resumed(recipe: Recipe) -> None:
    before = recipe(*COMMON, "trainer.max_steps=3")
    done = recipe(*COMPILED, *SHARDED, "trainer.max_steps=8", run=before.run)
    assert done.code == 0, done
    assert ONCE in done.out


@pytest.mark.slow
def test_the_stages_of_a_pipeline_have_the_weights_of_one_worker(recipe: Recipe) -> None:
    words = (*COMPILED, "model.dropout=0")
    one = recipe(*words, "trainer.gpus=1")
    pipeline = (*words, "strategy=pipeline", "strategy.schedule=interleaved", "strategy.stages_per_worker=2")
    again = (
        *pipeline,
        "strategy.init=replay",
        "trainer.activation_checkpointing=[Block]",
        "trainer.checkpoint_every=1",
    )
    interrupted = recipe(*again, environ={"DDPEXP_FAULT": "backward:kill:1:30"})
    resumed = recipe(*again, run=interrupted.run)
    assert "resumed after step" in resumed.out
    for done in (recipe(*pipeline), resumed):
        assert done.code == 0, done
        assert ONCE in done.out
        assert done.result()["weights_sha256"] == one.result()["weights_sha256"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_random_moments_every_run_ends_with_the_same_weights(recipe: Recipe) -> None:
    """Twenty runs, sharded or whole, are killed in a pass or a write of one rank, or while it compiles, and resumed."""
    chance = random.Random(0)
    words = (*COMPILED, "trainer.checkpoint_every=1", "trainer.ema_decay=0.9")
    expected = recipe(*words)
    for number in range(20):
        way = (*SHARDED, f"strategy.init={chance.choice(['whole', 'replay'])}") if number % 4 else ("strategy=ddp",)
        place = chance.choice(["forward", "forward", "backward", "checkpoint.share", "checkpoint.written"])
        count = chance.randrange(1, 15 if place in ("forward", "backward") else 7)
        fault = f"{place}:kill:{chance.randrange(2)}:{count}"
        killed = recipe(*words, *way, environ={"DDPEXP_FAULT": fault})
        assert killed.code == 1, (fault, killed)
        resumed = recipe(*words, *way, run=killed.run)
        assert resumed.code == 0, (fault, resumed)
        assert files(resumed.run) == files(expected.run), fault
        assert resumed.result()["weights_sha256"] == expected.result()["weights_sha256"], fault
