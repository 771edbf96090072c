"""A loss over all samples of the global batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from tests.conftest import Ddpexp
from tests.fitting import Once, fit_alone, manual, near
from tests.points import Recipe, weights
from tests.ranks import on_ranks
from tests.refusals import refused

CODE = """\
class Towers(nn.Module):
    # Two towers for two halves of a point, and a temperature that only the loss reads: as CLIP.
    def __init__(self, dropout=0.0, scales=False):
        super().__init__()
        self.scales = scales
        self.left = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 4))
        self.right = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 4))
        self.scale = nn.Parameter(torch.tensor([0.5]))

    def forward(self, rows):
        left, right = self.left(rows[:, :2]), self.right(rows[:, 2:])
        left, right = nn.functional.normalize(left, dim=1), nn.functional.normalize(right, dim=1)
        return left * self.scale.exp() if self.scales else left, right


class Pairs:
    # Each half of a point belongs to the other one, among all points of the global batch.
    def embed(self, model, batch):
        left, right = model(batch[1])
        return {"left": left, "right": right, "label": batch[2]}

    def loss(self, model, embeddings):
        scores = embeddings["left"] @ embeddings["right"].T
        scores = scores if model.scales else scores * model.scale.exp()
        labels = torch.arange(len(scores))
        both = sum(nn.functional.cross_entropy(one, labels, reduction="sum") for one in (scores, scores.T)) / 2
        right = ((scores.argmax(1) == labels) & (embeddings["label"] >= 0)).sum()
        return both, len(scores), {"found": (right, len(scores))}
"""


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What a step does is tested, not how a rank starts."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("pairs"), environ), CODE)


@pytest.fixture(scope="module")
def points(recipe: Recipe) -> Any:
    return recipe.module()


@pytest.fixture
def fit(points: Any, tmp_path: Path) -> Callable[..., Once]:
    return partial(fit_alone, points, tmp_path, factory=points.Towers)


def plain(model: Any, batch: Any) -> Tensor:
    """The loss as a plain program on one device computes it, with the whole batch at once."""
    left, right = model(batch[1])
    scores, labels = left @ right.T * model.scale.exp(), torch.arange(len(left))
    loss: Tensor = (cross_entropy(scores, labels) + cross_entropy(scores.T, labels)) / 2
    return loss


@pytest.mark.parametrize("keys", [{}, {"micro_batch_size": 4}, {"micro_batch_size": 6, "reduction": "exact"}], ids=str)
def test_the_loss_is_that_of_the_whole_batch(points: Any, fit: Callable[..., Once], keys: dict[str, Any]) -> None:
    once = fit(points.Pairs(), log_every=1, **keys)
    expected, losses, norms = manual(points, loss=plain, factory=points.Towers)
    assert near(once.weights, expected, 1e-6)
    steps = [record for record in once.records if "train/loss" in record]
    assert [record["train/loss"] for record in steps] == pytest.approx(losses, rel=1e-5)
    assert [record["train/grad_norm"] for record in steps] == pytest.approx(norms, rel=1e-4)
    assert all(0 <= record["train/found"] <= 1 for record in steps)
    assert float(once.weights["model.scale"]) != 0.5  # the temperature is trained, once


@pytest.mark.variants(2)
@pytest.mark.parametrize(
    "keys",
    [
        "trainer.gpus=2 trainer.micro_batch_size=4",
        "trainer.gpus=2 trainer.micro_batch_size=4 strategy=fsdp +model.scales=true",
        "trainer.gpus=3",
        "trainer.gpus=3 trainer.micro_batch_size=4 trainer.reduction=exact",
        "trainer.gpus=2 trainer.micro_batch_size=6 strategy.shard_optimizer=true trainer.compile=true",
    ],
)
def test_every_number_of_workers_trains_as_one_process(
    points: Any, recipe: Recipe, fit: Callable[..., Once], keys: str
) -> None:
    done = recipe(
        "task._target_=points.Pairs", "model._target_=points.Towers", "~model.hidden", "scheduler=cosine",
        "trainer.log_every=1", "optimizer.lr=0.05", "optimizer.momentum=0.9", "optimizer.nesterov=true", *keys.split(),
    )  # fmt: skip
    assert done.code == 0, done.err
    alone = fit(points.Pairs(), log_every=1)
    assert near(weights(done), alone.weights, 1e-5)
    metrics = json.loads((done.run / "result.json").read_text())["metrics"]  # of batches as large as global ones
    assert metrics == pytest.approx(alone.loop.progress.metrics, rel=1e-4)


def test_dropout_is_the_same_in_both_passes_and_buffers_change_once(points: Any, fit: Callable[..., Once]) -> None:
    def build() -> Any:
        model = points.Towers(dropout=0.3)
        model.left.insert(0, nn.BatchNorm1d(2))
        return model

    once = fit(points.Pairs(), micro_batch_size=8, factory=build)
    assert int(once.weights["model.left.0.num_batches_tracked"]) == 24


GENERATOR = torch.Generator()


@pytest.mark.parametrize(
    ("functions", "reason"),
    [
        ({"embed": lambda model, batch: model(batch[1])[0].sum()}, ": a row for each sample"),
        ({"embed": lambda model, batch: [model(batch[1]), 1]}, ": a row for each sample"),
        ({"loss": lambda model, embeddings: embeddings["left"].sum()}, ": a single tensor"),
        ({"embed": lambda model, batch: {"left": torch.randn(len(batch[1]), 4, generator=GENERATOR).requires_grad_(),
                                         "right": model(batch[1])[1], "label": batch[2]}}, ": other values"),
    ],
)  # fmt: skip
def test_functions_that_return_something_else_are_refused(
    points: Any, fit: Callable[..., Once], functions: Any, reason: str
) -> None:
    task = points.Pairs()
    vars(task).update(functions)
    with refused(reason, DdpexpError):
        fit(task, micro_batch_size=6, eval_every=0)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("local_sgd", "strategy=local_sgd: embed and loss"),
        ("fsdp", "Pairs.loss (: reads a parameter of the model"),
    ],
)
def test_strategies_in_which_the_loss_cannot_be_computed_are_named(recipe: Recipe, strategy: str, reason: str) -> None:
    done = recipe("task._target_=points.Pairs", "model._target_=points.Towers", "~model.hidden", "trainer.gpus=2",
                  f"strategy={strategy}")  # fmt: skip
    assert done.code != 0
    assert all(part in done.err for part in reason.split(": ")), done.err


def test_rows_are_gathered_in_the_order_of_the_ranks_with_their_gradients(tmp_path: Path) -> None:
    def gathered(world: World) -> Any:
        own = torch.full((world.rank + 1, 2), float(world.rank + 1), requires_grad=True)
        every = world.gather(own)
        (every.sum(1) * torch.arange(1.0, len(every) + 1)).sum().mul(world.rank + 1).backward()  # type: ignore[no-untyped-call]
        flags = world.gather(torch.tensor([world.rank == 1]))
        return every.detach().tolist(), own.grad, flags.tolist(), float(world.max(torch.tensor(float(-world.rank))))

    for size in (1, 2, 3):
        results = on_ranks(tmp_path, size, gathered) if size > 1 else [gathered(World.alone())]
        rows = [[float(rank + 1)] * 2 for rank in range(size) for _ in range(rank + 1)]
        for rank, (every, gradient, flags, greatest) in enumerate(results):
            assert every == rows
            begin, losses = rank * (rank + 1) // 2, sum(range(1, size + 1))
            expected = torch.arange(begin + 1.0, begin + rank + 2)[:, None].expand(-1, 2) * losses
            assert torch.equal(gradient, expected)
            assert flags == [other == 1 for other in range(size)]
            assert greatest == 0
