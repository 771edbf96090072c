"""Optimizer steps: gradients of every kind, several losses and networks, and steps that are left out."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from ddpexp.strategy.mesh import DataRank
from ddpexp.train.metrics import MetricAccumulator
from tests.conftest import Ddpexp
from tests.fitting import Once, fit_alone, manual, near
from tests.points import Recipe, weights
from tests.ranks import on_ranks
from tests.refusals import refused

CODE = """\
import random

import numpy as np

from ddpexp.data.order import Permutation


class Words(nn.Module):
    # A table of which a step sees some rows, several of them more than once.
    def __init__(self, sparse=True, **options):
        super().__init__()
        self.table = nn.Embedding(16, 4, sparse=sparse)
        self.out = nn.Linear(4, 2)

    def forward(self, ids):
        return self.out(self.table(ids % 11))


class Reads(Sides):
    # The table's rows, with an optimizer that takes sparse gradients.
    def optimizers(self, model, make):
        return {"optimizer": torch.optim.SGD(model.parameters(), lr=0.5)}

    def step(self, model, batch):
        return super().step(lambda rows: model(batch[0]), batch)


class Normed(nn.Sequential):
    def __init__(self, **options):
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))


class Poisoned(Sides):
    # One sample is not a number; noise comes from numpy and Python.
    def step(self, model, batch):
        ids, rows, labels = batch
        if model.training:
            noise = np.random.rand() + random.random()
            rows = torch.where((ids == 17)[:, None], torch.nan, rows) + 0.1 * noise
        return super().step(model, (ids, rows, labels))


class LeavesOut(Poisoned):
    # The same, but the steps that see that sample are not taken at all.
    number = 0

    def train_step(self, update, batches):
        order = Permutation(96, 0, self.number // 4)(np.arange(96))
        bad = 17 in order[self.number % 4 * 24 : self.number % 4 * 24 + 24]
        self.number += 1
        total, count = torch.zeros(()), 0
        for number, batch in enumerate(() if bad else batches):
            with update.micro_batch(last=number == len(batches) - 1) as micro_batch:
                loss, each, _ = self.step(update.models, batch)
                micro_batch.backward(loss, each)
            total, count = total + loss.detach(), count + each
        if not bad:
            update.apply()
        return total, count, {"accuracy": (torch.zeros(()), count)}


class Repeats(Sides):
    # Two passes over the micro-batches, each for half of the loss; the second with the noise of the first, or another.
    def __init__(self, repeats=True, passes=2, **options):
        super().__init__(**options)
        self.repeats, self.passes = repeats, passes

    def train_step(self, update, batches):
        lasts = [number == len(batches) - 1 for number in range(len(batches))]
        micro_batches = [update.micro_batch(last=last) for last in lasts]
        total = torch.zeros(())
        for turn in range(self.passes):
            if turn and not self.repeats:
                micro_batches = [update.micro_batch(last=last) for last in lasts]
            for entered, (ids, rows, labels) in zip(micro_batches, batches):
                with entered as micro_batch:
                    noisy = rows + torch.randn(rows.shape)
                    loss, count, _ = self.step(update.models, (ids, noisy, labels))
                    micro_batch.backward(loss / self.passes, count)
                    total = total + loss.detach() / self.passes
        update.apply()
        return total, sum(len(labels) for _, _, labels in batches), {}


class Double(Sides):
    def step(self, model, batch):
        return super().step(model, (batch[0], batch[1].double(), batch[2]))


def double(**options):
    return Net(**options).double()
"""


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What a step does is tested, not how a rank starts."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("updates"), environ), CODE)


@pytest.fixture(scope="module")
def points(recipe: Recipe) -> Any:
    return recipe.module()


@pytest.fixture
def fit(points: Any, tmp_path: Path) -> Callable[..., Once]:
    """Train in this process, alone: `fit(task, num_steps=8, factory=Net, evals=..., **trainer keys)`."""
    return partial(fit_alone, points, tmp_path)


def norms(once: Once) -> list[float]:
    return [record["train/grad_norm"] for record in once.records if "train/grad_norm" in record]


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_sparse_gradients_are_measured_clipped_and_checked_as_dense_ones(
    points: Any, fit: Callable[..., Once], nonfinite: str
) -> None:
    keys = {"log_every": 1, "clip_grad_norm": 0.3, "micro_batch_size": 12, "nonfinite": nonfinite}
    found = fit(points.Reads(), factory=points.Words, **keys)
    expected = fit(points.Reads(), factory=partial(points.Words, sparse=False), **keys)
    assert near(found.weights, expected.weights, 1e-6)
    assert norms(found) == pytest.approx(norms(expected), rel=1e-5)
    assert min(norms(found)) < 0.3 < max(norms(found))


@pytest.mark.variants(1)
@pytest.mark.parametrize("size", [2, 3])
def test_sparse_gradients_train_at_every_world_size(
    points: Any, fit: Callable[..., Once], recipe: Recipe, size: int
) -> None:
    overrides = (
        "task._target_=points.Reads",
        "model._target_=points.Words",
        "~model.hidden",
        "~model.dropout",
        "scheduler=cosine",
    )
    done = recipe(*overrides, f"trainer.gpus={size}", "trainer.log_every=1", "trainer.clip_grad_norm=0.3")
    assert done.code == 0, done.err
    alone = fit(points.Reads(), factory=points.Words, log_every=1, clip_grad_norm=0.3)
    assert near(weights(done), alone.weights, 1e-5)
    found = [record["train/grad_norm"] for record in done.metrics() if "train/grad_norm" in record]
    assert found == pytest.approx(norms(alone), rel=1e-4)


class Mixed(nn.Module):
    """Three layers, each with its own kind of number."""

    def __init__(self, *kinds: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 2, dtype=kind) for kind in kinds)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = [layer(rows.to(next(layer.parameters()).dtype)) for layer in self.layers]
        return torch.stack([(one.abs() if one.is_complex() else one).double() for one in found]).sum(0)


@pytest.mark.parametrize(("limit", "nonfinite"), [(None, "stop"), (0.5, "stop"), (0.5, "skip")])
@pytest.mark.parametrize(
    "kinds",
    [
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.complex64, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.complex128, torch.float64, torch.bfloat16),
    ],
    ids=str,
)
def test_gradients_of_mixed_kinds_of_numbers_have_one_norm(
    points: Any, fit: Callable[..., Once], kinds: tuple[torch.dtype, ...], limit: float | None, nonfinite: str
) -> None:
    seen: list[float] = []

    def watched(parameters: Any) -> torch.optim.Optimizer:
        mine = list(parameters)
        optimizer = torch.optim.SGD(mine, lr=0.05)

        def look(*_: Any) -> None:
            wide = [torch.view_as_real(p.grad.resolve_conj()) if p.grad.is_complex() else p.grad for p in mine]
            seen.append(float(torch.cat([one.double().flatten() for one in wide]).norm()))

        optimizer.register_step_pre_hook(look)
        return optimizer

    once = fit(
        points.Sides(), factory=partial(Mixed, *kinds), make=watched, log_every=1, clip_grad_norm=limit, eval_every=0,
        nonfinite=nonfinite,
    )  # fmt: skip
    tolerance = 5e-3 if limit and torch.bfloat16 in kinds else 1e-5
    assert seen == pytest.approx([min(norm, limit or norm) for norm in norms(once)], rel=tolerance)
    assert max(norms(once)) > 0.5


def counted(rows: torch.Tensor) -> torch.Tensor:
    return (rows[:, 0] > 0).sum()


class TwoLosses:
    """Two losses in each micro-batch, in two calls or in one; `counts(rows, labels)` are what they are divided by."""

    def __init__(self, counts: Callable[..., tuple[Any, Any]], together: bool = False) -> None:
        self.counts = counts
        self.together = together

    def losses(self, model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        _, rows, labels = batch
        scores = model(rows)
        return nn.functional.cross_entropy(scores, labels, reduction="sum"), (scores.square() * (rows[:, :1] > 0)).sum()

    def train_step(self, update: Any, batches: list[Any]) -> Any:
        total = torch.zeros(())
        for number, batch in enumerate(batches):
            with update.micro_batch(last=number == len(batches) - 1) as micro_batch:
                first, second = self.losses(update.models, batch)
                one, other = self.counts(*batch[1:])
                if self.together:
                    micro_batch.backward(first + second, one)
                else:
                    micro_batch.backward(first, one)
                    micro_batch.backward(self.losses(update.models, batch)[1], other)
            total += (first + second).detach()
        update.apply()
        return total, 24, {}

    def step(self, model: Any, batch: Any) -> Any:
        return self.losses(model, batch)[0], len(batch[0]), {}


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_several_losses_with_tensor_counts_have_the_gradient_of_their_sum(
    fit: Callable[..., Once], reduction: str
) -> None:
    keys = {"micro_batch_size": 6, "log_every": 1, "eval_every": 0, "reduction": reduction}
    numbers = fit(TwoLosses(lambda rows, labels: (6, 6)), **keys)
    tensors = fit(TwoLosses(lambda rows, labels: (torch.tensor(6), torch.tensor(6))), **keys)
    assert near(tensors.weights, numbers.weights, 1e-6)
    mixed = fit(TwoLosses(lambda rows, labels: (torch.tensor(6), torch.tensor(6.0))), **keys)
    assert near(mixed.weights, tensors.weights, 0)
    assert norms(tensors) == pytest.approx(norms(numbers), rel=1e-5)
    each = fit(TwoLosses(lambda rows, labels: (counted(rows), counted(rows))), **keys)
    together = fit(TwoLosses(lambda rows, labels: (counted(rows), None), together=True), **keys)
    assert near(each.weights, together.weights, 1e-6)
    assert not near(each.weights, numbers.weights, 1e-3)  # the comparison can fail


def test_a_loss_that_a_micro_batch_leaves_out_counts_for_the_others(fit: Callable[..., Once]) -> None:
    class Sometimes(TwoLosses):
        def train_step(self, update: Any, batches: list[Any]) -> Any:
            for number, batch in enumerate(batches):
                with update.micro_batch(last=number == len(batches) - 1) as micro_batch:
                    micro_batch.backward(self.losses(update.models, batch)[0], *self.counts(number)[:1])
                    if number % 2:
                        micro_batch.backward(self.losses(update.models, batch)[0], self.counts(number)[1])
            update.apply()
            return torch.zeros(()), 24, {}

    keys = {"micro_batch_size": 6, "eval_every": 0}
    numbers = fit(Sometimes(lambda number: (6, 6)), **keys)  # each of the two counts 24
    tensors = fit(Sometimes(lambda number: (torch.tensor(6), torch.tensor(12))), **keys)  # 4 times 6, and twice 12
    assert near(tensors.weights, numbers.weights, 1e-6)


class Passes(TwoLosses):
    """Passes over some micro-batches, of which each is the last one of its round or not; then `apply`."""

    def __init__(self, *lasts: bool, count: Any = 6) -> None:
        super().__init__(lambda rows, labels: (count, count))
        self.lasts = lasts

    def train_step(self, update: Any, batches: list[Any]) -> Any:
        for batch, last in zip(itertools.cycle(batches), self.lasts, strict=False):
            with update.micro_batch(last=last) as micro_batch:
                micro_batch.backward(self.losses(update.models, batch)[0], self.counts(*batch[1:])[0])
        update.apply()
        return torch.zeros(()), 24, {}


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (Passes(False, False, False, False), "apply before the workers"),
        (Passes(False, True), "apply after 2 micro-batches"),
    ],
)
def test_a_round_that_is_not_complete_is_refused(fit: Callable[..., Once], task: Any, reason: str) -> None:
    with refused(reason, DdpexpError):
        fit(task, micro_batch_size=6, eval_every=0)


def test_a_round_over_some_micro_batches_is_divided_by_their_tensors(fit: Callable[..., Once]) -> None:
    keys = {"micro_batch_size": 6, "eval_every": 0, "log_every": 1, "num_steps": 1}
    first = fit(Passes(False, True, count=torch.tensor(6)), **keys)
    same = fit(Passes(False, True, count=torch.tensor(3)), **keys)  # of a sum over 12, half of it counted
    assert 2 * norms(first)[0] == pytest.approx(norms(same)[0], rel=1e-5)


def test_every_turn_through_the_micro_batches_has_counts_of_its_own(fit: Callable[..., Once]) -> None:
    keys = {"micro_batch_size": 6, "eval_every": 0}
    lasts = [*[False] * 7, True]  # two turns
    numbers = fit(Passes(*lasts), **keys)
    tensors = fit(Passes(*lasts, count=torch.tensor(6)), **keys)
    assert near(tensors.weights, numbers.weights, 1e-6)


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("size", [6, 24])
def test_a_micro_batch_that_is_entered_again_repeats_its_random_numbers(
    points: Any, fit: Callable[..., Once], reduction: str, size: int
) -> None:
    keys = {"micro_batch_size": size, "eval_every": 0, "reduction": reduction}
    once = fit(points.Repeats(passes=1), **keys)
    assert near(fit(points.Repeats(), **keys).weights, once.weights, 1e-6)
    assert not near(fit(points.Repeats(repeats=False), **keys).weights, once.weights, 1e-3)


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_passes_that_are_repeated_train_to_the_same_at_two_workers(recipe: Recipe, reduction: str) -> None:
    words = ("task._target_=points.Repeats", "trainer.micro_batch_size=6", f"trainer.reduction={reduction}")
    one, two = (recipe(*words, f"trainer.gpus={size}") for size in (1, 2))
    assert (one.code, two.code) == (0, 0), two.err
    assert relative(weights(two), weights(one)) < 1e-6


def test_a_train_step_knows_its_step_and_whether_it_was_taken(points: Any, fit: Callable[..., Once]) -> None:
    seen = []

    class Knows(points.Sides):  # type: ignore[misc]
        def train_step(self, update: Any, batches: list[Any]) -> Any:
            with update.micro_batch(last=True) as micro_batch:
                loss, count, _ = self.step(update.models, batches[0])
                micro_batch.backward(loss * (math.nan if update.step == 1 else 1.0), count)
            seen.append((update.step, update.num_steps, update.world.world_size, update.apply()))
            return loss.detach(), count, {}

    fit(Knows(), num_steps=3, nonfinite="skip")
    assert seen == [(0, 3, 1, True), (1, 3, 1, False), (2, 3, 1, True)]


def test_every_apply_has_a_gradient_norm_of_its_own(points: Any, fit: Callable[..., Once]) -> None:
    keys = {"factory": lambda: {"left": points.Net(), "right": points.Net()}, "log_every": 1, "clip_grad_norm": 1e-3}
    each = fit(Both(("left",), ("right",)), **keys).records[0]
    assert {"train/grad_norm/left", "train/grad_norm/right"} < each.keys()
    assert "train/grad_norm" not in each
    whole = fit(Both(()), **keys).records[0]["train/grad_norm"]
    assert math.hypot(each["train/grad_norm/left"], each["train/grad_norm/right"]) == pytest.approx(whole, rel=1e-5)


def test_gradients_that_nobody_applies_are_refused(fit: Callable[..., Once]) -> None:
    class Forgets(TwoLosses):
        def train_step(self, update: Any, batches: list[Any]) -> Any:
            with update.micro_batch(last=True) as micro_batch:
                micro_batch.backward(self.losses(update.models, batches[0])[0], 24)
            return torch.zeros(()), 24, {}

    with refused("without a later update.apply", DdpexpError):
        fit(Forgets(lambda number: (24, 24)), eval_every=0)


@pytest.mark.parametrize("count", [None, torch.ones(1), "24"])
def test_a_count_that_is_no_number_is_named(fit: Callable[..., Once], count: Any) -> None:
    with refused(": gave micro_batch.backward", DdpexpError):
        fit(TwoLosses(lambda rows, labels: (count, count)), eval_every=0)


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        (lambda rows, labels: (torch.tensor(6), counted(rows)), "tensors that count 24"),
        (lambda rows, labels: (6, counted(rows)), "numbers and tensors"),
        (lambda rows, labels: (counted(rows), 6), "numbers and tensors"),
        (lambda rows, labels: (6, int(counted(rows))), "after"),
        (lambda rows, labels: (0, 6), "the count 0"),
    ],
)
def test_counts_that_cannot_be_divided_by_are_refused(
    fit: Callable[..., Once], counts: Callable[..., Any], reason: str
) -> None:
    with refused(reason, DdpexpError):
        fit(TwoLosses(counts), micro_batch_size=6)


def test_a_number_after_a_tensor_is_refused_in_a_step_of_one_micro_batch(fit: Callable[..., Once]) -> None:
    with refused("numbers and tensors", DdpexpError):
        fit(TwoLosses(lambda rows, labels: (counted(rows), 6)))


def test_a_task_that_counts_nothing_with_a_number_is_refused(points: Any, fit: Callable[..., Once]) -> None:
    class Nothing(points.Sides):  # type: ignore[misc]
        def step(self, model: Any, batch: Any) -> Any:
            return super().step(model, batch)[0], 0, {}

    with refused("gave", DdpexpError):
        fit(Nothing())


def test_a_count_that_is_a_number_may_be_another_one_in_each_step(points: Any, fit: Callable[..., Once]) -> None:
    class Chunks(points.Sides):  # type: ignore[misc]
        calls = 0

        def step(self, model: Any, batch: Any) -> Any:
            loss, count, _ = super().step(model, batch)
            times = 1 + self.calls // 4 % 2  # in every second step of four micro-batches
            self.calls += model.training
            return loss * times, count * times, {}

    expected = fit(points.Sides(), micro_batch_size=6).weights
    assert near(fit(Chunks(), micro_batch_size=6).weights, expected, 1e-6)


def numbers_of(counts: Sequence[Any], equal: bool) -> Callable[[World], str]:
    def work(world: World) -> str:
        sums = MetricAccumulator(world, DataRank(world.rank, 2), [world.rank], 2, equal_counts=() if equal else None)
        for step in range(2):
            sums.add([(torch.tensor(1.0), counts[world.rank * step], {})])
        try:
            sums.reduce(1, stop=False)
        except DdpexpError as error:
            return str(error)
        return ""

    return work


def test_a_number_that_differs_between_ranks_is_named_before_it_is_recorded(tmp_path: Path) -> None:
    found = on_ranks(tmp_path, 2, numbers_of([12, 7], equal=True))
    assert found[0] == found[1]
    assert found[0].startswith("the task returned the counts 12 and 7 for micro-batches of one step on different ranks")
    assert on_ranks(tmp_path, 2, numbers_of([torch.tensor(12), torch.tensor(7)], equal=True)) == ["", ""]
    assert on_ranks(tmp_path, 2, numbers_of([12, 7], equal=False)) == ["", ""]  # as in evaluation


def test_a_global_batch_of_padding_alone_teaches_nothing_and_poisons_no_record(
    points: Any, fit: Callable[..., Once]
) -> None:
    class Padded(points.Sides):  # type: ignore[misc]
        calls = 0

        def step(self, model: Any, batch: Any) -> Any:
            loss, count, _ = super().step(model, batch)
            kept = float(self.calls // 4 != 2) if model.training else 1.0  # the third step's four micro-batches
            self.calls += model.training
            return loss * kept, torch.tensor(count * kept), {}

    once = fit(Padded(), micro_batch_size=6, log_every=4, make=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    whole = fit(
        points.Sides(), micro_batch_size=6, log_every=1, make=lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    train = [record["train/loss"] for record in once.records if "train/loss" in record]
    expected = [record["train/loss"] for record in whole.records if "train/loss" in record]
    assert train[0] == pytest.approx((expected[0] + expected[1] + expected[3]) / 3, abs=2e-2)
    assert all(bool(tensor.isfinite().all()) for tensor in once.weights.values())


class Both:
    """Two networks whose gradients come from one round; `names` is what each call of apply is for."""

    def __init__(self, *names: tuple[str, ...], again: bool = False) -> None:
        self.names = names
        self.again = again

    def optimizers(self, model: Any, make: Any) -> Any:
        return {name: make(module.parameters()) for name, module in model.items()}

    def train_step(self, update: Any, batches: list[Any]) -> Any:
        for _ in range(1 + self.again):
            for number, (_, rows, labels) in enumerate(batches):
                with update.micro_batch(last=number == len(batches) - 1) as micro_batch:
                    scores = update.models["left"](rows) + update.models["right"](rows)
                    loss = nn.functional.cross_entropy(scores, labels, reduction="sum")
                    micro_batch.backward(loss, torch.tensor(len(labels)))
            for names in self.names:
                update.apply(*names)
        return loss.detach(), len(labels), {}

    def step(self, model: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(model["left"](batch[1]), batch[2], reduction="sum"), len(batch[0]), {}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_several_applies_use_the_gradients_of_one_round(
    points: Any, fit: Callable[..., Once], reduction: str, precision: str
) -> None:
    def pair() -> dict[str, nn.Module]:
        return {"left": points.Net(), "right": points.Net()}

    keys = {"factory": pair, "micro_batch_size": 6, "reduction": reduction, "eval_every": 0, "precision": precision}
    for again in (False, True):
        at_once = fit(Both((), again=again), **keys)
        in_turn = fit(Both(("right",), ("left",), again=again), **keys)
        for name, tensor in at_once.weights.items():
            assert torch.equal(tensor, in_turn.weights[name]), name
        assert at_once.loop.run.precision.state() == in_turn.loop.run.precision.state()


@pytest.mark.parametrize("names", [((), ("left",)), (("left",), ("left",)), (("left", "left"),), (("left",), ())])
def test_the_same_gradients_are_not_applied_twice(points: Any, fit: Callable[..., Once], names: Any) -> None:
    with refused("twice", DdpexpError):
        fit(Both(*names), factory=lambda: {"left": points.Net(), "right": points.Net()})


def test_an_optimizer_that_there_is_not_is_named(points: Any, fit: Callable[..., Once]) -> None:
    with refused("middle", DdpexpError):
        fit(Both(("left", "middle")), factory=lambda: {"left": points.Net(), "right": points.Net()})


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_a_step_that_is_left_out_leaves_no_trace(points: Any, fit: Callable[..., Once], reduction: str) -> None:
    keys = {
        "num_steps": 60, "factory": points.Normed, "micro_batch_size": 6, "nonfinite": "skip", "ema_decay": 0.9,
        "reduction": reduction, "eval_every": 20,
    }  # fmt: skip
    ends = []
    for task in (points.Poisoned(), points.LeavesOut()):
        np.random.seed(0)
        random.seed(0)
        once = fit(task, **keys)
        average = once.loop.average
        assert average is not None
        ends.append((once.weights, average.tensors("model"), np.random.rand(), random.random()))
    for found, expected in zip(*(end[:2] for end in ends), strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert all(bool(tensor.isfinite().all()) for tensor in found.values())
    assert ends[0][2:] == ends[1][2:]


@pytest.mark.variants(1)
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_a_step_that_is_left_out_leaves_no_trace_on_any_of_two_workers(recipe: Recipe, reduction: str) -> None:
    overrides = ("model._target_=points.Normed", "trainer.gpus=2", "trainer.micro_batch_size=6",
        f"trainer.reduction={reduction}",
             "trainer.max_steps=60", "trainer.epochs=null", "trainer.nonfinite=skip",
             "trainer.ema_decay=0.9")  # fmt: skip
    found, expected = (recipe(*overrides, f"task._target_=points.{task}") for task in ("Poisoned", "LeavesOut"))
    assert (found.code, expected.code) == (0, 0), found.err + expected.err
    assert found.result()["weights_sha256"] == expected.result()["weights_sha256"]
    kept = weights(found)
    assert any(name.startswith("model.ema.") for name in kept)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in weights(expected).items())
    assert math.isfinite(found.result()["metrics"]["eval/loss"])


def test_an_fp16_step_that_overflows_leaves_no_trace(points: Any, fit: Callable[..., Once]) -> None:
    class Steep(points.Sides):  # type: ignore[misc]
        def step(self, model: Any, batch: Any) -> Any:
            loss, count, metrics = super().step(model, batch)
            return (
                loss * 1e30 if model.training else loss,
                count,
                metrics,
            )  # with the scale more than fp32 holds, in any step

    once = fit(Steep(), num_steps=3, precision="fp16", ema_decay=0.5, factory=points.Normed)
    torch.manual_seed(0)
    fresh = points.Normed().state_dict()
    assert all(torch.equal(once.weights[f"model.{name}"], tensor) for name, tensor in fresh.items())
    assert once.loop.average is not None
    assert all(torch.equal(once.loop.average.tensors("model")[name], tensor) for name, tensor in fresh.items())
    assert once.loop.run.precision.state()["scale"] == 2.0**13


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_optimizer_without_a_gradient_in_a_step_does_nothing(
    points: Any, fit: Callable[..., Once], precision: str
) -> None:
    class One(Both):
        def train_step(self, update: Any, batches: list[Any]) -> Any:
            _, rows, labels = batches[0]
            with update.micro_batch(last=True) as micro_batch:
                loss = nn.functional.cross_entropy(update.models["left"](rows), labels, reduction="sum")
                micro_batch.backward(loss, len(labels))
            update.apply()
            return loss.detach(), len(labels), {}

    once = fit(
        One(), factory=lambda: {"left": points.Net(), "right": points.Net()}, nonfinite="skip", precision=precision
    )
    torch.manual_seed(0)
    fresh = {"left": points.Net(), "right": points.Net()}
    for name, module in fresh.items():
        same = [torch.equal(once.weights[f"{name}.{key}"], tensor) for key, tensor in module.state_dict().items()]
        assert all(same) if name == "right" else not any(same)


@pytest.mark.parametrize(("names", "moves"), [(((),), False), ((("left",), ("right",)), True)])
def test_the_optimizers_of_one_apply_step_together_or_not_at_all(
    points: Any, fit: Callable[..., Once], names: Any, moves: bool
) -> None:
    def pair() -> dict[str, nn.Module]:
        return {"left": points.Net(), "right": points.Net()}

    def spoilt() -> dict[str, nn.Module]:
        models = pair()
        next(models["left"].parameters()).register_hook(lambda gradient: gradient * torch.inf)  # type: ignore[no-untyped-call]
        return models

    once = fit(Both(*names), factory=spoilt, nonfinite="skip")
    torch.manual_seed(0)
    fresh = {f"{name}.{key}": tensor for name, module in pair().items() for key, tensor in module.state_dict().items()}
    moved = {name.partition(".")[0] for name, tensor in fresh.items() if not torch.equal(once.weights[name], tensor)}
    assert moved == ({"right"} if moves else set())


@pytest.mark.parametrize(
    ("precision", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_a_tasks_own_train_step_computes_in_the_configured_precision(
    points: Any, fit: Callable[..., Once], precision: str, kind: torch.dtype
) -> None:
    forwards, backwards = set(), set()

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
            return scores.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            backwards.add(torch.is_autocast_enabled("cpu"))
            return gradient

    class ByHand(points.Sides):  # type: ignore[misc]
        def train_step(self, update: Any, batches: list[Any]) -> Any:
            for number, (_, rows, labels) in enumerate(batches):
                with update.micro_batch(last=number == len(batches) - 1) as micro_batch:
                    with torch.no_grad():
                        update.models(rows)  # as a GAN's other network does, whose weights are cast for it
                    scores = update.models(rows)
                    forwards.add(scores.dtype)
                    seen = Looks.apply(scores)  # type: ignore[no-untyped-call]
                    loss = nn.functional.cross_entropy(seen, labels, reduction="sum")
                    micro_batch.backward(loss, len(labels))
            update.apply()
            return loss.detach(), len(labels), {}

    keys = {"precision": precision, "micro_batch_size": 6, "num_steps": 12}
    found = fit(ByHand(), **keys)
    assert forwards == {kind}
    assert backwards == {False}
    expected = fit(points.Sides(), **keys)
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in expected.weights.items())


def relative(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(float((found[name] - tensor).norm() / tensor.norm()) for name, tensor in expected.items())


@pytest.mark.parametrize("task", ["numbers", "tensors"])
def test_double_precision_is_kept(points: Any, fit: Callable[..., Once], recipe: Recipe, task: str) -> None:
    class Tensors(points.Double):  # type: ignore[misc]
        def step(self, model: Any, batch: Any) -> Any:
            loss, count, metrics = super().step(model, batch)
            return loss, torch.tensor(count), metrics

    expected, _, _ = manual(points, kind=torch.float64)
    once = fit(points.Double() if task == "numbers" else Tensors(), factory=points.double, micro_batch_size=4)
    assert relative(once.weights, expected) < 1e-14


@pytest.mark.variants(1)
@pytest.mark.parametrize("size", [2, 3])
def test_double_precision_is_kept_at_every_world_size(points: Any, recipe: Recipe, size: int) -> None:
    done = recipe(
        "task._target_=points.Double", "model._target_=points.double", "scheduler=cosine", f"trainer.gpus={size}"
    )
    assert done.code == 0, done.err
    assert relative(weights(done), manual(points, kind=torch.float64)[0]) < 1e-14
