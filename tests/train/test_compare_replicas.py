"""Ranks that no longer hold the same: named with module, step and ranks, before a checkpoint holds one rank's alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ddpexp.checkpoint.format import complete_checkpoints, open_checkpoint
from ddpexp.checkpoint.reader import read_all
from ddpexp.distributed.world import World
from ddpexp.strategy.ddp import DDP
from ddpexp.train.compare_replicas import ReplicaComparison, ReplicaError, _digests, _of_device
from ddpexp.train.states import RankStates
from tests.conftest import Ddpexp
from tests.fitting import STRATEGY, near
from tests.points import Recipe, weights
from tests.ranks import on_ranks

CODE = """\
class Counting(Net):
    # A buffer in which each rank counts for itself what it has seen.
    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, rows):
        if self.training:
            self.seen += (rows.sum(1) > 0).long().bincount(minlength=2)
        return super().forward(rows)


class Drifting(Sides):
    # Rank 1 alone changes a weight, at its fifth step.
    steps = 0

    def step(self, model, batch):
        self.steps += model.training
        if RANK == 1 and self.steps == 5 and model.training:
            with torch.no_grad():
                next(model.parameters())[0, 0] += 1e-6
        return super().step(model, batch)


class Uneven(nn.Module):
    # Calls of the model that are as many as the episode is long; a buffer counts them, the same on all ranks.
    def __init__(self, **options):
        super().__init__()
        self.net = Net()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, rows):
        return self.net(rows) * self.scale


class Episodes(Sides):
    def step(self, model, batch):
        index, rows, labels = batch
        whole = super().step(model, batch)
        extra = sum(model(rows[:1]).square().sum() for _ in range(int(index[0]) % 4)) if model.training else 0
        return whole[0] + 0.01 * extra, *whole[1:]
"""


def spoil_nothing(model: nn.Module, rank: int) -> None:
    pass


def spoil_a_weight(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        model.get_parameter("0.weight")[1, 2] += rank


def spoil_a_buffer(model: nn.Module, rank: int) -> None:
    model.get_buffer("1.queue")[0] += rank
    spoil_a_norm(model, rank)


def spoil_a_norm(model: nn.Module, rank: int) -> None:
    model.get_buffer("2.running_mean")[0] += rank
    model.get_buffer("2.num_batches_tracked").add_(rank)


def built() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Identity(), nn.BatchNorm1d(4))
    module[1].register_buffer("queue", torch.zeros(2, dtype=torch.complex64), persistent=False)
    module[1].register_buffer("flag", torch.tensor(True))
    return module


def compared(spoil: Callable[[nn.Module, int], None], broadcasts: bool) -> Callable[[World], str]:
    def work(world: World) -> str:
        strategy = DDP(replace(STRATEGY, broadcast_buffers=broadcasts), world, built)
        comparison = ReplicaComparison(strategy, world)
        comparison.compare(1)
        spoil(strategy.modules["model"], world.rank)
        try:
            comparison.compare(1)  # known to be the same
            comparison.compare(7)
        except ReplicaError as error:
            return str(error)
        return ""

    return work


@pytest.mark.parametrize("spoil", [spoil_nothing, spoil_a_norm])
def test_the_same_replicas_and_statistics_of_normalization_pass(
    tmp_path: Path, spoil: Callable[[nn.Module, int], None]
) -> None:
    assert on_ranks(tmp_path, 2, compared(spoil, True)) == ["", ""]


def test_a_parameter_that_differs_is_named_on_every_rank(tmp_path: Path) -> None:
    found = on_ranks(tmp_path, 3, compared(spoil_a_weight, True))
    assert len(set(found)) == 1
    assert found[0].startswith("after step 7 the parameter model.0.weight differs between rank 0 and rank 1, and every")


def test_a_buffer_that_differs_is_named_unless_each_rank_keeps_its_own(tmp_path: Path) -> None:
    found = on_ranks(tmp_path, 2, compared(spoil_a_buffer, True))
    assert found[0] == found[1]
    assert found[0].startswith("after step 7 the buffer model.1.queue differs between rank 0 and rank 1, and a checkpo")
    assert on_ranks(tmp_path, 2, compared(spoil_a_buffer, False)) == ["", ""]


def test_any_one_byte_changes_the_number_of_a_tensor() -> None:
    values = torch.arange(40, dtype=torch.int16)
    known = _digests([values])[0], int(_of_device(values))
    for place in range(80):
        changed = values.clone()
        changed.view(torch.uint8)[place] += 1
        assert _digests([changed])[0] != known[0]
        assert int(_of_device(changed)) != known[1]
    assert int(_of_device(values.flip(0))) != known[1]


def test_values_that_change_places_in_other_parts_change_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpexp.train.compare_replicas._CHUNK", 1 << 9)
    values = torch.randn(1000)
    changed = values.clone()
    changed[[10, 138]] = changed[[138, 10]]  # the same place of the first part and of the second
    assert int(_of_device(values)) == int(_of_device(values.clone())) != int(_of_device(changed))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, warm_single_environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("replicas"), warm_single_environ), CODE)


def seen_by_ranks(run: Path) -> list[str]:
    """What each of two ranks has for itself in the last checkpoint."""
    newest = open_checkpoint(complete_checkpoints(run / "checkpoints")[0])
    return [str(read_all(own)["model.seen"]) for own in RankStates(newest, "buffers", 2)]


@pytest.mark.variants(1)
@pytest.mark.parametrize("through", ["auto", "backend"])
def test_state_that_each_rank_keeps_in_a_buffer_is_refused_before_a_checkpoint(recipe: Recipe, through: str) -> None:
    """The run fails after the first step; each rank keeps its own where that is asked for, and a resume has it."""
    counting = ("model._target_=points.Counting", "trainer.gpus=2", f"strategy.reduce_through={through}")
    done = recipe(*counting)
    assert done.code == 1
    assert "after step 1 the buffer model.seen differs between rank 0 and rank 1, and a checkpoint would" in done.err
    assert not list((done.run / "checkpoints").glob("step-*"))
    own = recipe(*counting, "strategy.broadcast_buffers=false", "trainer.checkpoint_every=3")
    assert own.code == 0, own.err
    assert own.out.count("the buffer model.seen differs between rank 0 and rank 1, and with this strategy each") == 1
    stopped = recipe(*counting, "strategy.broadcast_buffers=false", "trainer.max_steps=3")
    resumed = recipe.ddpexp(
        "resume", str(stopped.run), "trainer.max_steps=null", "--config-dir", f"{recipe.folder}/conf"
    )
    assert resumed.code == 0, resumed.err
    assert weights(stopped)["model.seen"].equal(weights(own)["model.seen"])
    assert seen_by_ranks(stopped.run) == seen_by_ranks(own.run)
    assert len(set(seen_by_ranks(own.run))) == 2


def test_a_weight_that_one_rank_changes_ends_the_run_and_the_checkpoint_before_stays(recipe: Recipe) -> None:
    done = recipe("task._target_=points.Drifting", "trainer.gpus=2", "trainer.checkpoint_every=3")
    assert done.code == 1
    assert "after step 6 the parameter model.0.weight differs between rank 0 and rank 1" in done.err
    assert [path.name for path in sorted((done.run / "checkpoints").glob("step-*"))] == ["step-00000003"]
    early = recipe("task._target_=points.Drifting", "trainer.gpus=2", "trainer.compare_replicas=1")
    assert "after step 5 the parameter model.0.weight differs" in early.err


@pytest.mark.variants(1)
@pytest.mark.parametrize("through", ["auto", "backend"])
def test_ranks_may_call_a_model_with_buffers_differently_often(recipe: Recipe, through: str) -> None:
    """The weights are those of one worker that takes the same micro-batches, which no other order of calls gives."""
    uneven = ("model._target_=points.Uneven", "task._target_=points.Episodes", "trainer.micro_batch_size=12")
    alone = recipe(*uneven, "trainer.gpus=1")
    done = recipe(*uneven, "trainer.gpus=2", f"strategy.reduce_through={through}", "trainer.timeout.step_seconds=20")
    assert (alone.code, done.code) == (0, 0), done.err
    assert near(weights(done), weights(alone), 1e-6)
