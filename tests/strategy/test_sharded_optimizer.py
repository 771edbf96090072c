"""strategy.shard_optimizer: the weights, the state and the files of whole optimizers, with a share on each rank."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ddpexp.checkpoint.format import complete_checkpoints
from ddpexp.errors import WorkerError
from ddpexp.launch import Layout
from ddpexp.strategy.ddp_estimator import DDPEstimator
from ddpexp.strategy.estimator import Facts, Parameter
from ddpexp.strategy.sharded_optimizer import Rows, can_be_cut, divide
from tests.conftest import Ddpexp
from tests.fitting import STRATEGY, TRAINER
from tests.points import Recipe
from tests.strategy.on_ranks import launch, works
from tests.strategy.sharded import CUT, WHOLE


def test_parameters_are_divided_evenly_between_rows() -> None:
    shapes = [(10, 10), (4,), (), (100, 3), (1, 50), (0, 3)]
    for ranks in (1, 2, 3, 4, 8):
        divided = divide(shapes, ranks, by_rows=True)
        sizes = [0] * ranks
        for shape, rows in zip(shapes, divided, strict=True):
            num_rows = shape[0] if shape else 1
            assert [part.first for part in rows] == [sum(part.count for part in rows[:rank]) for rank in range(ranks)]
            assert sum(part.count for part in rows) == num_rows
            row_size = torch.Size(shape[1:]).numel()
            sizes = [size + part.count * row_size for size, part in zip(sizes, rows, strict=True)]
        assert max(sizes) - 455 / ranks <= 50  # within the largest row


def test_parameters_that_are_not_cut_go_to_one_rank_each() -> None:
    divided = divide([(6, 10), (6, 10), (6, 10), (6, 10)], 2, by_rows=False)
    assert [[part.count for part in rows] for rows in divided] == [[6, 0], [6, 0], [0, 6], [0, 6]]
    assert divide([(3, 2)], 2, by_rows=False) == [[Rows(0, 0), Rows(0, 3)]]


@pytest.mark.parametrize("name", [*CUT, *WHOLE])
def test_parameters_are_cut_where_a_part_is_rounded_as_the_whole(name: str) -> None:
    optimizer = {**CUT, **WHOLE}[name]([nn.Parameter(torch.zeros(2, 2))])
    for rate in (0.01, 0.0025, 1e-5):  # with a small one, few bits of a parameter change in a step
        optimizer.param_groups[0]["lr"] = rate
        assert can_be_cut(optimizer) == (name in CUT)


def test_an_average_of_a_part_rounds_as_that_of_the_whole() -> None:
    for size in range(1, 68):
        whole, target = (torch.randn(size, generator=torch.Generator().manual_seed(size + n)) for n in (0, 100))
        parts = whole[: size // 3].clone(), whole[size // 3 :].clone()
        torch._foreach_lerp_([whole], [target], 0.001)
        torch._foreach_lerp_(list(parts), [target[: size // 3], target[size // 3 :]], 0.001)
        assert torch.equal(whole, torch.cat(parts))


@pytest.mark.variants(1)
@pytest.mark.parametrize(("case", "size"), [("resumed", 2), ("equal", 3), ("equal", 2), ("equal", 4), ("resumed", 4)])
def test_weights_and_state_are_those_of_whole_optimizers(
    case: str, size: int, tmp_path: Path, forked_servers: None
) -> None:
    works("tests.strategy.sharded", case, size, tmp_path / "logs")


def test_sparse_gradients_are_refused(tmp_path: Path, forked_servers: None) -> None:
    with pytest.raises(WorkerError) as caught:
        launch("tests.strategy.sharded", "sparse", 2, tmp_path / "logs")
    assert caught.value.failure.message == (
        "a gradient is sparse, and strategy.shard_optimizer=true divides the rows of dense ones among the workers. "
        "Build the layer with sparse=False, or use strategy.shard_optimizer=false."
    )


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, warm_environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("sharded"), warm_environ))


def files(run: Path) -> dict[str, str]:
    """Return the hashes of the files of the newest checkpoint that hold the model, its average and the optimizer."""
    folder = complete_checkpoints(run / "checkpoints")[0]
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob("[!.]*.safetensors")
        if "rank" not in path.name
    }


@pytest.mark.slow
def test_checkpoints_are_the_same_files_and_each_resumes_the_other(recipe: Recipe) -> None:
    ways = "optimizer=adamw", "trainer.reduction=exact", "trainer.micro_batch_size=4", "trainer.clip_grad_norm=1"
    whole = recipe(*ways, "trainer.gpus=2", "trainer.ema_decay=0.9")
    assert whole.code == 0, whole.err
    run = recipe.ddpexp.folder / "in turn"
    for steps, gpus, sharded in ((3, 2, "true"), (6, 1, "false"), (8, 3, "true")):
        done = recipe(
            *ways, f"trainer.gpus={gpus}", f"strategy.shard_optimizer={sharded}", "trainer.ema_decay=0.9",
            f"trainer.max_steps={steps}", run=run,
        )  # fmt: skip
        assert done.code == 0, done.err
    assert files(run) == files(whole.run)
    assert "state.optimizers.safetensors" in files(run)


def test_the_plan_counts_a_share_of_the_state() -> None:
    facts = Facts([Parameter("model", 1000, 4000, "fp32", True)], 0, {"model": 4000}, 8001, None, None, None, 100)
    for sharded, expected in ((False, 8001), (True, 2001)):
        estimator = DDPEstimator(replace(STRATEGY, shard_optimizer=sharded))
        parts = estimator.memory(facts, TRAINER, Layout(1, 4, "cpu", "gloo", 1))
        assert {part.name: part.num_bytes for part in parts}["optimizer"] == expected
