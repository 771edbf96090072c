"""Keys of the trainer that limit data, gradients and checkpoints: each does what its comment says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpexp.checkpoint.format import best_first, complete_checkpoints, scan
from ddpexp.checkpoint.writer import Content, Writer
from ddpexp.data.adapters import MapStyle
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import EvalBatches, TrainBatches
from ddpexp.data.datasets import Splits, choose_samples, on_device
from ddpexp.strategy.replica import clip_values
from ddpexp.train.keep_best import with_value
from ddpexp.train.progress import TrainingProgress
from tests.conftest import Ddpexp
from tests.fitting import ALONE, Kept, Once, fit_alone, loop_alone, sgd
from tests.orders import hold_out
from tests.points import Recipe
from tests.records import timeless

CODE = """\
class Slow(Sides):
    def step(self, model, batch):
        time.sleep(0.01)
        return super().step(model, batch)
"""
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What the keys do is tested, not how a rank starts."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("keys"), environ), CODE)


@pytest.fixture(scope="module")
def points(recipe: Recipe) -> Any:
    return recipe.module()


@pytest.fixture
def fit(points: Any, tmp_path: Path) -> Callable[..., Once]:
    return partial(fit_alone, points, tmp_path)


# Gradients.


@pytest.mark.parametrize("limit", [None, 0.3])
def test_values_are_clipped_as_by_torch_and_after_the_norm(
    points: Any, fit: Callable[..., Once], limit: float | None
) -> None:
    once = fit(points.Sides(), num_steps=1, clip_grad_norm=limit, clip_grad_value=0.02, log_every=1)
    torch.manual_seed(0)
    model = points.Net()
    train = TrainBatches(points.points(96, 0), plan_batches(24, "auto", 1), 0, 0, CPU)
    _, rows, labels = next(train.steps(0, 1))[0]
    nn.functional.cross_entropy(model(rows), labels).backward()  # type: ignore[no-untyped-call]
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit if limit is not None else math.inf)
    nn.utils.clip_grad_value_(model.parameters(), 0.02)
    sgd(model.parameters()).step()
    for name, value in model.state_dict().items():
        assert torch.allclose(once.weights[f"model.{name}"], value, rtol=0, atol=1e-6)
    record = next(record for record in once.records if "train/grad_norm" in record)
    assert record["train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)  # before both


def test_values_of_sparse_and_complex_gradients_are_clipped_too() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    (embedding(torch.tensor([1, 1, 3])) * torch.tensor([5.0, -0.5])).sum().backward()
    wave = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    (wave.real.sum() * 3 - wave.imag.sum() * 0.25).backward()  # type: ignore[no-untyped-call]
    clip_values([embedding.weight, wave, nn.Parameter(torch.zeros(1))], 0.75)
    gradient = embedding.weight.grad
    assert gradient is not None
    assert gradient.to_dense().tolist() == [[0, 0], [0.75, -0.75], [0, 0], [0.75, -0.5]]
    assert wave.grad is not None
    assert wave.grad.tolist() == [0.75 - 0.25j] * 2


# Data.


class Numbers:
    """A map-style set of numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("batch", "limit", "total"), [(4, 10, 10), (3, 10, 10), (8, 2, 2), (4, 100, 33), (4, None, 33)]
)
def test_the_first_samples_are_evaluated_once_at_any_number_of_workers(
    points: Any, size: int, batch: int, limit: int | None, total: int
) -> None:
    for data, column in ((points.points(33, 1), 0), (MapStyle(Numbers(33)), slice(None))):
        parts = [EvalBatches(data, batch, rank, size, CPU, limit=limit) for rank in range(size)]
        seen = [int(index) for part in parts for found in part for index in found[column]]
        assert sorted(seen) == list(range(total))
        assert {part.num_batches for part in parts} == {-(-total // batch)}


def test_the_samples_to_train_on_are_the_same_in_every_run_and_no_mere_cut(points: Any) -> None:
    def ids(data: Any) -> list[int]:
        return [int(index) for index in data.gather(torch.arange(len(data)), CPU)[0]]

    kept, held = hold_out(points.points(96, 0), 0.25)
    chosen = choose_samples(kept, 24)
    assert len(set(ids(chosen))) == 24
    assert set(ids(chosen)) < set(ids(kept))
    assert ids(chosen) == ids(choose_samples(kept, 24)) != ids(kept)[:24]
    assert choose_samples(kept, 72) is kept
    there = on_device(Splits(chosen, {"eval": held}), CPU)
    assert ids(there.train) == ids(chosen)
    numbers = choose_samples(MapStyle(Numbers(96)), 5)
    assert [int(numbers[place]) for place in range(5)] == ids(choose_samples(points.points(96, 0), 5))


# Evaluations and checkpoints.


def test_an_evaluation_at_the_start_is_recorded_once_and_may_be_the_best(points: Any, tmp_path: Path) -> None:
    def trained(progress: TrainingProgress | None, **keys: Any) -> tuple[list[int], list[int]]:
        loop, path = loop_alone(points, tmp_path, points.Sides(), 4, eval_at_start=True, eval_every=4, **keys)
        loop.checkpointer = saves = Kept()
        if progress is not None:
            loop.progress.restore(asdict(progress))
        loop.fit()
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [line["step"] for line in lines if "eval/loss" in line], saves.steps

    assert trained(None, checkpoint_every=0) == ([0, 4], [4])
    assert trained(None, checkpoint_every=0, keep_best="min:eval/loss") == ([0, 4], [0, 4])
    assert trained(TrainingProgress(evaluated_at=0)) == ([4], [4])  # resumed from step 0
    assert trained(TrainingProgress(step=2)) == ([4], [4])  # the key was set since
    assert trained(TrainingProgress(evaluated=False)) == ([0, 4], [4])  # it was interrupted


def test_an_evaluation_at_the_start_changes_nothing(points: Any, fit: Callable[..., Once]) -> None:
    plain, evaluated = fit(points.Sides()), fit(points.Sides(), eval_at_start=True)
    assert all(torch.equal(plain.weights[name], value) for name, value in evaluated.weights.items())


def test_multiples_of_keep_every_are_saved_too(points: Any, tmp_path: Path) -> None:
    loop, _ = loop_alone(points, tmp_path, points.Sides(), 10, checkpoint_every=4, keep_every=3)
    loop.checkpointer = saves = Kept()
    loop.fit()
    assert saves.steps == [3, 4, 6, 8, 9, 10]


@pytest.mark.parametrize(
    ("keep_best", "value", "best", "count", "expected"),
    [
        ("max:eval/a", 1.0, [], 1, [1.0]),
        ("max:eval/a", 2.0, [1.0], 1, [2.0]),
        ("max:eval/a", 1.0, [1.0], 1, None),
        ("min:eval/a", 0.5, [1.0], 1, [0.5]),
        ("min:eval/a", 2.0, [1.0], 1, None),
        ("min:eval/a", math.nan, [], 1, None),
        ("min:eval/a", 2.0, [1.0], 2, [1.0, 2.0]),
        ("min:eval/a", 1.5, [1.0, 2.0], 2, [1.0, 1.5]),
        ("min:eval/a", 2.0, [1.0, 2.0], 2, None),
        ("max:eval/a", 1.0, [3.0, 2.0, 1.5], 2, None),  # fewer are kept than before
        ("max:eval/a", 1.0, [1.0], 3, [1.0, 1.0]),
    ],
)
def test_an_evaluation_counts_when_it_is_among_the_best(
    keep_best: str, value: float, best: list[float], count: int, expected: list[float] | None
) -> None:
    assert with_value(keep_best, value, best, count) == expected


def test_another_metric_starts_with_its_own_values(points: Any, tmp_path: Path) -> None:
    loop, _ = loop_alone(points, tmp_path, points.Sides(), 4, keep_best="min:eval/loss")
    loop.progress.restore(asdict(TrainingProgress(best=[-1.0], best_of="max:eval/accuracy")))
    loop.fit()
    assert loop.progress.best_of == "min:eval/loss"
    assert loop.progress.best[0] > 0


def test_the_best_and_every_multiple_stay(tmp_path: Path) -> None:
    writer = Writer(tmp_path, ALONE, keep_last=1, keep_best="max:eval/a", keep_best_k=2, keep_every=30)
    evaluations = [(10, 10, 0.9), (15, 10, 0.9), (20, 20, 0.5), (30, 30, 0.1), (40, 40, 0.8), (45, 40, 0.8)]
    for step, evaluated_at, value in [*evaluations, (60, 60, 0.2)]:
        facts = {"metrics": {"eval/a": value}, "evaluated_at": evaluated_at}
        writer.save(step, Content({"model": nn.Linear(2, 2).state_dict()}, facts=facts))
    writer.save(70, Content({"model": nn.Linear(2, 2).state_dict()}))
    writer.wait(end=True)
    complete = scan(tmp_path).complete
    assert [checkpoint.step for checkpoint in complete] == [70, 60, 40, 30, 10]
    assert [checkpoint.step for checkpoint in best_first(complete, "max:eval/a")] == [10, 40, 60, 30]
    assert best_first(complete, "min:eval/a")[0].step == 30
    assert best_first(complete, "max:eval/b") == []


def test_a_run_has_the_same_numbers_with_all_keys_however_it_is_interrupted(recipe: Recipe) -> None:
    keys = (
        "trainer.reduction=exact", "trainer.micro_batch_size=12", "trainer.limit_train_samples=75",
        "trainer.limit_eval_batches=1", "trainer.eval_at_start=true", "trainer.eval_every=2",
        "trainer.clip_grad_norm=0.5", "trainer.clip_grad_value=0.1", "trainer.checkpoint_every=0",
        "trainer.keep_every=5", "trainer.keep_best=min:eval/loss", "trainer.keep_best_k=2", "trainer.keep_last=1",
        "trainer.epochs=5", "trainer.log_every=1", "task._target_=points.Slow",
    )  # fmt: skip
    whole = recipe(*keys)
    assert whole.code == 0, whole.err
    assert "trained on 75 samples, evaluated on at most 24 of each set" in whole.out
    assert "15 (5 epochs of 3 steps; each leaves out 3 samples)" in whole.out
    early = recipe(*keys, "trainer.gpus=2", "trainer.max_seconds=0.001")
    assert early.code == 0, early.err
    first = early.result()
    assert (first["status"], 0 < first["step"] < 15) == ("done", True)
    assert first["stopped"] == f"trainer.max_seconds=0.001 reached after step {first['step']} of 15"
    assert early.out.splitlines()[-2] == f"ended early: {first['stopped']}"
    killed = recipe(
        *keys, "trainer.gpus=2", "trainer.max_seconds=null", run=early.run,
        environ={"DDPEXP_FAULT": f"step:kill:1:{9 - first['step']}"},
    )  # fmt: skip
    assert killed.code == 1
    done = recipe(*keys, "trainer.max_seconds=null", run=early.run)
    assert done.code == 0, done.err
    assert done.result()["stopped"] is None
    assert done.result()["weights_sha256"] == whole.result()["weights_sha256"]

    def records(run: Any) -> list[dict[str, Any]]:
        return [
            timeless(record)
            for record in run.metrics()
            if "eval/loss" not in record or record["step"] % 2 == 0  # the early end evaluates once more
        ]

    assert records(done) == records(whole)
    assert [record["step"] for record in records(whole) if "eval/loss" in record] == [0, 2, 4, 6, 8, 10, 12, 14]
    kept = [
        sorted(int(path.name.removeprefix("step-")) for path in complete_checkpoints(run / "checkpoints"))
        for run in (whole.run, done.run)
    ]
    assert kept[0] == kept[1]
    assert {5, 10, 15} <= set(kept[0])
