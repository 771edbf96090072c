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
import ddpexp


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


class TwoRounds(Pairs):
    # The same by hand: embeddings without gradients, the slopes of the loss of all of them, then gradients.
    def train_step(self, update, batches):
        model, world = update.models, update.world
        firsts, parts = [], []
        for batch in batches:
            with update.micro_batch(last=False) as micro_batch, torch.no_grad():
                parts.append(self.embed(model, batch))
            firsts.append(micro_batch)
        own = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        rows = {name: world.gather(tensor) for name, tensor in own.items()}
        read = [rows["left"].requires_grad_(), rows["right"].requires_grad_(), model.scale]
        loss, count, metrics = self.loss(model, rows)
        left, right, scale = torch.autograd.grad(loss, read)
        begin = world.rank * len(own["label"])
        for number, (batch, first) in enumerate(zip(batches, firsts), start=1):
            with first.repeat(last=number == len(batches)) as micro_batch:
                part = self.embed(model, batch)
                end = begin + len(batch[1])
                share = (part["left"] * left[begin:end]).sum() + (part["right"] * right[begin:end]).sum()
                micro_batch.backward(share + (model.scale * scale).sum() * float(begin == 0), len(batch[1]))
            begin = end
        update.apply()
        mine = int(world.is_rank_zero)
        return loss.detach() * mine, count * mine, {name: (total * mine, n * mine) for name, (total, n) in metrics.items()}


class OneRound(Pairs):
    # The same where a rank has one micro-batch, which gradients leave by the gather: each rank has its rows of the loss.
    def train_step(self, update, batches):
        [batch], model, world = batches, update.models, update.world
        with update.micro_batch(last=True) as micro_batch:
            left, right = model(batch[1])
            scores = (left @ world.gather(right).T, right @ world.gather(left).T)
            begin = world.rank * len(left)
            labels = torch.arange(begin, begin + len(left))
            loss = sum(nn.functional.cross_entropy(one * model.scale.exp(), labels, reduction="sum") for one in scores) / 2
            micro_batch.backward(loss, len(left))
        update.apply()
        return loss.detach(), len(left), {}


class Collects(ddpexp.Callback):
    # What communicates in a callback: uneven rows of all ranks, and the rest.
    communicates = True

    def on_step(self, run):
        world = run.world
        rows = world.gather(torch.full((world.rank + 1,), float(world.rank)))
        total = world.sum(torch.tensor(1.0 + world.rank))
        most = world.max(torch.tensor(float(world.rank)))
        last = world.broadcast(torch.tensor(float(world.rank)), source=world.world_size - 1)
        assert rows.tolist() == [float(rank) for rank in range(world.world_size) for _ in range(rank + 1)]
        assert (total, most, last) == (sum(range(world.world_size + 1)), world.world_size - 1, world.world_size - 1)
        run.logger.scalars(run.step, run.epoch, {"collected": float(len(rows))})


class Silent(Collects):
    communicates = False
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
        "trainer.gpus=2 trainer.micro_batch_size=4 trainer.reduction=exact",
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
    if "exact" in keys:
        exact = fit(points.Pairs(), micro_batch_size=4, reduction="exact").weights
        assert all(torch.equal(tensor, exact[name]) for name, tensor in weights(done).items())
    metrics = json.loads((done.run / "result.json").read_text())["metrics"]  # of batches as large as global ones
    assert metrics == pytest.approx(alone.loop.progress.metrics, rel=1e-4)


def test_dropout_is_the_same_in_both_passes_and_buffers_change_once(points: Any, fit: Callable[..., Once]) -> None:
    def build() -> Any:
        model = points.Towers(dropout=0.3)
        model.left.insert(0, nn.BatchNorm1d(2))
        return model

    once = fit(points.Pairs(), micro_batch_size=8, factory=build)
    assert int(once.weights["model.left.0.num_batches_tracked"]) == 24


def test_random_numbers_of_the_loss_are_the_same_for_every_micro_batch_size(
    points: Any, fit: Callable[..., Once]
) -> None:
    class Noisy(points.Pairs):  # type: ignore[misc]
        def loss(self, model: Any, embeddings: Any) -> Any:
            noise = torch.randn_like(embeddings["left"])
            return super().loss(model, {**embeddings, "left": embeddings["left"] + noise})

    one, two, six = (fit(Noisy(), micro_batch_size=size).weights for size in (24, 12, 4))
    assert near(two, one, 1e-6)
    assert near(six, one, 1e-6)
    assert not near(fit(points.Pairs()).weights, one, 1e-3)


@pytest.mark.parametrize("keys", [{}, {"micro_batch_size": 8}], ids=str)
def test_small_slopes_are_not_lost_in_fp16(points: Any, fit: Callable[..., Once], keys: dict[str, Any]) -> None:
    class Faint(points.Pairs):  # type: ignore[misc]
        def loss(self, model: Any, embeddings: Any) -> Any:
            loss, count, metrics = super().loss(model, embeddings)
            return loss * 1e-6, count, metrics

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=5e4)

    half = fit(Faint(), make=sgd, precision="fp16", eval_every=0, **keys)
    assert near(half.weights, fit(Faint(), make=sgd, eval_every=0).weights, 5e-3)


def test_a_frozen_tower_stays_and_the_rest_is_trained(points: Any, fit: Callable[..., Once]) -> None:
    def build() -> Any:
        model = points.Towers()
        model.left.requires_grad_(False)
        return model

    once, expected = (
        fit(points.Pairs(), micro_batch_size=8, factory=build),
        manual(points, loss=plain, factory=build)[0],
    )
    assert near(once.weights, expected, 1e-6)


class Queue(nn.Module):
    """Rows that a task keeps in a buffer."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("queue", torch.zeros(4, 2))

    def forward(self, rows: Tensor) -> Tensor:
        embedded: Tensor = self.linear(rows)
        return embedded


class Remembers:
    """A task whose `embed` or `loss` changes the buffer."""

    def __init__(self, where: str) -> None:
        self.where = where

    def embed(self, model: Any, batch: Any) -> Tensor:
        return self.moved(model, model(batch[1]), "embed")

    def loss(self, model: Any, embeddings: Tensor) -> Any:
        return self.moved(model, embeddings, "loss").square().sum(), len(embeddings), {}

    def moved(self, model: Any, rows: Tensor, where: str) -> Tensor:
        if where != self.where:
            return rows
        moved: Tensor = rows + model.queue.mean(0)
        if model.training:
            model.queue.copy_(rows[:4].detach())
        return moved


def test_a_buffer_that_the_loss_changes_is_changed_once_a_step(fit: Callable[..., Once]) -> None:
    one, six = (fit(Remembers("loss"), micro_batch_size=size, factory=Queue).weights for size in (24, 4))
    assert near(one, six, 1e-6)
    assert not torch.equal(one["model.queue"], torch.zeros(4, 2))
    with refused(": trainer.reduction=fast", DdpexpError):
        fit(Remembers("loss"), micro_batch_size=4, factory=Queue, reduction="exact")


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_both_passes_have_the_buffers_that_embed_changes(fit: Callable[..., Once], reduction: str) -> None:
    fit(Remembers("embed"), micro_batch_size=4, factory=Queue, reduction=reduction, eval_every=0)


def test_statistics_of_several_micro_batches_that_workers_share_are_refused(
    points: Any, fit: Callable[..., Once]
) -> None:
    def build() -> Any:
        model = points.Towers()
        model.left.insert(0, nn.SyncBatchNorm(2))
        return model

    with refused(": trainer.micro_batch_size=24", DdpexpError):
        fit(points.Pairs(), micro_batch_size=4, factory=build)


def test_a_train_step_of_two_rounds_trains_as_the_loss_over_the_global_batch(
    points: Any, fit: Callable[..., Once]
) -> None:
    found = fit(points.TwoRounds(), micro_batch_size=8, factory=partial(points.Towers, dropout=0.3))
    expected = fit(points.Pairs(), micro_batch_size=8, factory=partial(points.Towers, dropout=0.3))
    assert near(found.weights, expected.weights, 1e-6)
    assert found.records[0]["train/loss"] == pytest.approx(expected.records[0]["train/loss"])


@pytest.mark.parametrize(
    ("task", "keys"),
    [
        ("TwoRounds", "trainer.gpus=2 trainer.micro_batch_size=4"),
        ("OneRound", "trainer.gpus=1"),
        ("OneRound", "trainer.gpus=3"),
    ],
)
def test_a_train_step_and_a_callback_may_communicate_at_every_number_of_workers(
    points: Any, recipe: Recipe, fit: Callable[..., Once], task: str, keys: str
) -> None:
    done = recipe(
        f"task._target_=points.{task}", "model._target_=points.Towers", "~model.hidden", "scheduler=cosine",
        "optimizer.lr=0.05", "optimizer.momentum=0.9", "optimizer.nesterov=true", "trainer.log_every=1",
        "+callbacks.collects._target_=points.Collects", *keys.split(),
    )  # fmt: skip
    assert done.code == 0, done.err
    expected, losses, _ = manual(points, loss=plain, factory=points.Towers)
    assert near(weights(done), expected, 1e-6)
    records = [json.loads(line) for line in (done.run / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/loss"] for line in records if "train/loss" in line] == pytest.approx(losses, rel=1e-5)
    size = int(keys.split()[0][-1])
    assert {line["collected"] for line in records if "collected" in line} == {size * (size + 1) / 2}


def test_a_callback_that_does_not_say_that_it_communicates_has_no_collectives(recipe: Recipe) -> None:
    done = recipe("+callbacks.silent._target_=points.Silent", "trainer.gpus=1")
    assert done.code != 0
    assert "communicates = True" in done.err, done.err


def test_a_train_step_has_the_same_loss_by_its_update(points: Any, fit: Callable[..., Once]) -> None:
    """Its further rounds have other random numbers, each the same ones in both passes."""

    class Rounds(points.Pairs):  # type: ignore[misc]
        def __init__(self, number: int) -> None:
            self.number = number

        def train_step(self, update: Any, batches: list[Any]) -> Any:
            for _ in range(self.number):
                sums = update.backward(batches)
                update.apply()
            return sums

    dropout = partial(points.Towers, dropout=0.3)
    once, other = (fit(task, micro_batch_size=6, factory=dropout, log_every=1) for task in (points.Pairs(), Rounds(1)))
    assert near(other.weights, once.weights, 0)
    records = [[record["train/loss"] for record in one.records if "train/loss" in record] for one in (once, other)]
    assert records[1] == pytest.approx(records[0], rel=1e-6)
    assert not near(fit(Rounds(2), micro_batch_size=6, factory=dropout).weights, once.weights, 1e-3)
    parts, whole = (fit(Rounds(2), micro_batch_size=size) for size in (6, 24))
    assert near(parts.weights, whole.weights, 1e-6)


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
