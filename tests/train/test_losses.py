"""Several losses in one step, each over its own count in the global batch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddpexp.errors import DdpexpError
from tests.conftest import Ddpexp
from tests.fitting import Once, fit_alone, manual, near
from tests.points import Recipe, weights
from tests.refusals import refused

CODE = """\
class Sizes:
    # The side of each point, its class weighted, and the size of those that have one: as a detector's class and box.
    def __init__(self, box=2.0, counts=False, numbers=False):
        self.box, self.numbers = box, numbers
        self.table = torch.tensor([0.25, 1.0])
        if counts:
            self.counts = self.counts_of

    def counts_of(self, batch):
        _, rows, labels = batch
        return {"class": self.table[labels].sum(), "box": self.has_size(rows).sum()}

    @staticmethod
    def has_size(rows):
        return rows[:, 0] > 0.6

    def losses(self, scores, rows, labels):
        each = nn.functional.cross_entropy(scores, labels, weight=self.table, reduction="sum")
        off = (scores[:, 0] - rows[:, 1]).abs()[self.has_size(rows)].sum()
        return each, off

    def step(self, model, batch):
        _, rows, labels = batch
        each, off = self.losses(model(rows), rows, labels)
        counts = {"class": len(rows), "box": len(rows)} if self.numbers else self.counts_of(batch)
        return {"class": (each, counts["class"]), "box": (off, counts["box"], self.box)}, {
            "seen": (torch.tensor(1.0), len(rows))
        }


class ByHand(Sizes):
    def train_step(self, update, batches):
        sums = update.backward(batches)
        update.apply()
        return sums
"""


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What a step does is tested, not how a rank starts."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("losses"), environ), CODE)


@pytest.fixture(scope="module")
def points(recipe: Recipe) -> Any:
    return recipe.module()


@pytest.fixture
def fit(points: Any, tmp_path: Path) -> Callable[..., Once]:
    return partial(fit_alone, points, tmp_path)


def plain(model: Any, batch: Any) -> Tensor:
    """The loss as a plain program computes it: means over the whole batch, with torch's own divisions."""
    _, rows, labels = batch
    scores = model(rows)
    has_size = rows[:, 0] > 0.6
    loss: Tensor = cross_entropy(scores, labels, weight=torch.tensor([0.25, 1.0]))
    loss += 2 * (scores[:, 0] - rows[:, 1])[has_size].abs().mean()
    return loss


WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "one micro-batch": ("Sizes", {}, {}),
    "passes without gradients": ("Sizes", {}, {"micro_batch_size": 4}),
    "counts of the task": ("Sizes", {"counts": True}, {"micro_batch_size": 3}),
    "exact": ("Sizes", {}, {"micro_batch_size": 8, "reduction": "exact"}),
    "by hand": ("ByHand", {"counts": True}, {"micro_batch_size": 6}),
    "by hand, with passes without gradients": ("ByHand", {}, {"micro_batch_size": 4}),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_loss_is_divided_by_its_count_in_the_global_batch(points: Any, fit: Callable[..., Once], way: str) -> None:
    kind, arguments, keys = WAYS[way]
    once = fit(getattr(points, kind)(**arguments), log_every=1, **keys)
    expected, losses, norms = manual(points, loss=plain)
    assert near(once.weights, expected, 1e-6)
    steps = [record for record in once.records if "train/loss" in record]
    assert [record["train/loss"] for record in steps] == pytest.approx(losses, rel=1e-5)
    assert [record["train/grad_norm"] for record in steps] == pytest.approx(norms, rel=1e-5)
    for record in steps:
        parts = record["train/loss/class"] + 2 * record["train/loss/box"]
        assert record["train/loss"] == pytest.approx(parts, rel=1e-6)
    assert not near(manual(points, loss=lambda model, batch: plain(model, batch) / 2)[0], expected, 1e-3)


def test_an_evaluation_divides_each_loss_by_its_count_in_the_whole_set(points: Any, fit: Callable[..., Once]) -> None:
    once = fit(points.Sizes(), micro_batch_size=4)  # the last batch of 33 points has one
    model = points.Net()
    model.load_state_dict(once.loop.run.strategy.modules["model"].state_dict())
    metrics = once.loop.progress.metrics
    assert metrics["eval/loss"] == pytest.approx(plain(model, points.points(33, 1).tensors).item(), rel=1e-5)
    assert metrics["eval/loss"] == pytest.approx(metrics["eval/loss/class"] + 2 * metrics["eval/loss/box"], rel=1e-6)


def test_losses_with_numbers_as_counts_take_no_reduction_and_no_further_pass(
    points: Any, fit: Callable[..., Once]
) -> None:
    calls = []

    class Watched(points.Sizes):  # type: ignore[misc]
        def step(self, model: Any, batch: Any) -> Any:
            calls.append(torch.is_grad_enabled())
            return super().step(model, batch)

    once = fit(Watched(numbers=True), micro_batch_size=6, eval_every=0, num_steps=4)
    assert calls.count(True) == 16
    assert calls.count(False) == 0
    numbers = fit(points.Sizes(numbers=True), eval_every=0, num_steps=4)
    assert near(once.weights, numbers.weights, 1e-6)


def test_passes_that_only_count_leave_no_trace(points: Any, fit: Callable[..., Once]) -> None:
    """Dropout draws what it draws where the counts are known from the batch, and BatchNorm sees each batch once."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))

    passes, counts = (fit(points.Sizes(counts=counts), micro_batch_size=6, factory=build) for counts in (False, True))
    assert near(passes.weights, counts.weights, 0)
    assert int(passes.weights["model.1.num_batches_tracked"]) == 32


def test_a_batch_in_which_a_loss_counts_nothing_gives_it_no_gradient(points: Any, fit: Callable[..., Once]) -> None:
    class Never(points.Sizes):  # type: ignore[misc]
        @staticmethod
        def has_size(rows: Tensor) -> Tensor:
            return rows[:, 0] > 100

    once = fit(Never(), micro_batch_size=6, log_every=1)
    expected, _, _ = manual(
        points, loss=lambda model, batch: cross_entropy(model(batch[1]), batch[2], weight=torch.tensor([0.25, 1.0]))
    )
    assert near(once.weights, expected, 1e-6)
    metrics = once.loop.progress.metrics
    assert metrics["eval/loss"] == metrics["eval/loss/class"]
    assert math.isnan(metrics["eval/loss/box"])


class Finishes:
    """A loss that is no mean at all, for the evaluation alone."""

    def __init__(self, inner: Any) -> None:
        self.step = inner.step

    def finish(self, sums: Any) -> dict[str, float]:
        assert sums["loss"][1] == 1
        return {"loss": 3 * sums["loss"][0], "box_count": sums["loss/box"][1]}


def test_finish_may_set_the_loss_of_an_evaluation(points: Any, fit: Callable[..., Once]) -> None:
    once = fit(Finishes(points.Sizes()))
    metrics = once.loop.progress.metrics
    assert metrics["eval/loss"] == pytest.approx(3 * (metrics["eval/loss/class"] + 2 * metrics["eval/loss/box"]))
    assert metrics["eval/box_count"] == int((points.points(33, 1).tensors[1][:, 0] > 0.6).sum())


@pytest.mark.variants(2)
@pytest.mark.parametrize(
    "strategy",
    [
        "trainer.gpus=2 trainer.micro_batch_size=6",
        "strategy=pipeline trainer.gpus=2 +strategy.split_before=['2'] task.counts=true trainer.micro_batch_size=6",
        "trainer.gpus=3 trainer.micro_batch_size=8 trainer.reduction=exact",
        "strategy=fsdp trainer.gpus=2 trainer.micro_batch_size=6",
        "strategy=fsdp trainer.gpus=2 trainer.micro_batch_size=6 trainer.reduction=exact",
        "strategy.shard_optimizer=true trainer.gpus=2 trainer.micro_batch_size=12 trainer.compile=true",
    ],
)
def test_every_strategy_divides_by_the_counts_of_all_workers(
    points: Any, recipe: Recipe, fit: Callable[..., Once], strategy: str
) -> None:
    done = recipe(
        "task._target_=points.Sizes",
        "scheduler=cosine",
        "trainer.log_every=1",
        "optimizer.lr=0.05",
        "optimizer.momentum=0.9",
        "optimizer.nesterov=true",
        *strategy.split(),
    )
    assert done.code == 0, done.err
    alone = fit(points.Sizes(), log_every=1)
    assert near(weights(done), alone.weights, 1e-5)
    result = json.loads((done.run / "result.json").read_text())
    assert result["metrics"]["eval/loss"] == pytest.approx(alone.loop.progress.metrics["eval/loss"], rel=1e-5)


class Sums:
    """What `step` returns, as it is given."""

    def __init__(self, make: Callable[[Any, int], Any]) -> None:
        self.make, self.calls = make, 0

    def step(self, model: Any, batch: Any) -> Any:
        self.calls += 1
        loss = cross_entropy(model(batch[1]), batch[2], reduction="sum")
        return self.make(loss, self.calls)


COUNT = torch.tensor(6)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda loss, call: ({}, {}), ": no loss"),
        (lambda loss, call: ({"a": loss}, {}), ": (sum, count) or (sum, count, weight) belongs"),
        (lambda loss, call: ({"a": (loss.detach(), 6)}, {}), ": does not require a gradient"),
        (
            lambda loss, call: ({"a": (loss, torch.ones(3))}, {}),
            ": for the loss 'a' a tensor of shape (3,) as the count",
        ),
        (lambda loss, call: ({"a": (loss, 6, "two")}, {}), ": a str as the weight"),
        (lambda loss, call: ({"a": (loss, 6 + call)}, {}), "a number counts for every micro-batch"),
        (lambda loss, call: ({f"{'ab'[call > 1]}": (loss, COUNT)}, {}), ": must be known over the global batch"),
    ],
)
def test_losses_of_another_form_are_refused(fit: Callable[..., Once], make: Any, reason: str) -> None:
    with refused(reason, DdpexpError):
        fit(Sums(make), micro_batch_size=6, eval_every=0)


def test_counts_of_the_task_must_name_each_loss(points: Any, fit: Callable[..., Once]) -> None:
    task = points.Sizes()
    task.counts = lambda batch: {"class": task.counts_of(batch)["class"]}
    with refused(": 'box'", DdpexpError):
        fit(task, micro_batch_size=6, eval_every=0)
    task.counts = lambda batch: torch.tensor(6)
    with refused(": where {name: count} belongs", DdpexpError):
        fit(task, micro_batch_size=6, eval_every=0)
    task.counts = lambda batch: {**task.counts_of(batch), "box": torch.tensor(0.5)}
    with refused(": 'box', and the step 3", DdpexpError):
        fit(task, micro_batch_size=6, eval_every=0)


@pytest.mark.parametrize(
    ("batches", "reason"),
    [(lambda batches: [], "update.backward no micro-batches"), (lambda batches: batches, ": the task has none")],
)
def test_what_cannot_go_backward_is_refused(fit: Callable[..., Once], batches: Any, reason: str) -> None:
    class Manual:
        def train_step(self, update: Any, given: list[Any]) -> Any:
            return update.backward(batches(given))

    with refused(reason, DdpexpError):
        fit(Manual(), micro_batch_size=6, eval_every=0)


def test_a_train_step_with_several_micro_batches_needs_counts(points: Any, fit: Callable[..., Once]) -> None:
    class Manual(points.Sizes):  # type: ignore[misc]
        def train_step(self, update: Any, batches: list[Any]) -> Any:
            total, count = torch.zeros(()), 0
            for number, batch in enumerate(batches, start=1):
                with update.micro_batch(last=number == len(batches)) as micro_batch:
                    loss, each, _ = micro_batch.forward(batch)
                    micro_batch.backward(loss, each)
                total, count = total + loss.detach(), count + each
            update.apply()
            return total, count, {}

    with refused("counts(self, batch)", DdpexpError):
        fit(Manual(), micro_batch_size=6, eval_every=0)
    once = fit(Manual(counts=True), micro_batch_size=6, eval_every=0, log_every=1)
    expected, losses, _ = manual(points, loss=plain)
    assert near(once.weights, expected, 1e-6)
    assert [record["train/loss"] for record in once.records if "train/loss" in record] == pytest.approx(
        losses, rel=1e-5
    )
