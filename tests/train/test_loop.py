"""The run loop: the same samples and the same weights however they are cut, and everything recorded.

Where it belongs.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddpexp.data.order import Permutation
from ddpexp.settings.metrics import MEASURED
from ddpexp.strategy.mesh import DataRank
from ddpexp.train.metrics import MetricAccumulator, NonFiniteError
from ddpexp.train.optimizer_step import Step
from ddpexp.train.schedule import Cosine
from tests.conftest import Ddpexp, Done
from tests.fitting import ALONE, Once, fit_alone, loop_alone, manual, near
from tests.points import Recipe, weights
from tests.refusals import refused

CODE = """\
import json
import resource

import torch.distributed as dist

from ddpexp.strategy.comm import reduce
from ddpexp.strategy.comm.shared_memory import SharedMemory

collectives, reductions = 0, 0


def counted(function):
    def call(*words, **options):
        global collectives
        collectives += 1
        return function(*words, **options)

    return call


if "RANK" in os.environ:  # not in the process of the tests
    for name in (
        "all_reduce", "broadcast", "barrier", "all_gather", "reduce", "all_gather_into_tensor", "all_gather_object",
    ):
        setattr(dist, name, counted(getattr(dist, name)))
SharedMemory.sum = counted(SharedMemory.sum)
SharedMemory.broadcast = counted(SharedMemory.broadcast)


def counting(reducer, finish=reduce.SharedMemoryReducer.finish):
    global reductions
    reductions += 1
    finish(reducer)


reduce.SharedMemoryReducer.finish = counting


class Records(Sides):
    # One line for each call: which samples, and how often the ranks have talked before it.
    def __init__(self, folder):
        self.file = open(f"{folder}/{RANK}", "w", buffering=1)

    def step(self, model, batch):
        words = {"train": model.training, "ids": batch[0].tolist(), "collectives": collectives, "reductions": reductions}
        self.file.write(json.dumps(words) + "\\n")
        return super().step(model, batch)


class Large(Sides):
    # Sixteen megabytes a step, in blocks as activations are; how many pages the kernel has cleared for this process
    # before each.
    def __init__(self, folder):
        self.file = open(f"{folder}/{RANK}", "w", buffering=1)

    def step(self, model, batch):
        self.file.write(f"{resource.getrusage(resource.RUSAGE_SELF).ru_minflt}\\n")
        blocks = [torch.ones(1 << 18) for _ in range(16)]
        del blocks
        return super().step(model, batch)


class Masked(Sides):
    # Two thirds of the samples are padding, more of them in some micro-batches than in others.
    def step(self, model, batch):
        ids, rows, labels = batch
        kept = (ids % 16 < 4) | (ids % 7 == 0)
        losses = nn.functional.cross_entropy(model(rows), labels, reduction="none")
        return (losses * kept).sum(), kept.sum(), {"kept": (kept.sum(), len(ids))}


class Broken(Sides):
    # A sample that makes the loss not a number.
    def __init__(self, index=17, value="nan"):
        self.index, self.value = index, float(value)

    def step(self, model, batch):
        loss, count, metrics = super().step(model, batch)
        if model.training and (batch[0] == self.index).any():
            loss = loss * self.value
        return loss, count, metrics


class Pair:
    # Two networks and two optimizers under manual optimization: `left` learns the labels, `right` learns to undo it.
    def optimizers(self, model, make):
        return {name: make(module.parameters()) for name, module in model.items()}

    def train_step(self, update, batches):
        models = update.models
        for number, (_, rows, labels) in enumerate(batches):
            with update.micro_batch(last=number == len(batches) - 1) as micro_batch:
                loss = nn.functional.cross_entropy(models["left"](rows), labels, reduction="sum")
                micro_batch.backward(loss, len(labels))
        update.apply("left")
        for number, (_, rows, labels) in enumerate(batches):
            with update.micro_batch(last=number == len(batches) - 1) as micro_batch:
                scores = models["left"](rows) + models["right"](rows)
                other = nn.functional.cross_entropy(scores, 1 - labels, reduction="sum")
                micro_batch.backward(other, len(labels))
        update.apply("right")
        return loss.detach(), len(labels), {"other": (other.detach(), len(labels))}

    def step(self, model, batch):
        _, rows, labels = batch
        return nn.functional.cross_entropy(model["left"](rows), labels, reduction="sum"), len(labels), {}


def pair():
    return {"left": Net(), "right": Net()}


class Sums(Sides):
    # Means of the ids and of their squares over the set: wrong as soon as one sample is left out or counted twice.
    def step(self, model, batch):
        loss, count, _ = super().step(model, batch)
        ids = batch[0].double()
        return loss, count, {"ids": (ids.sum(), count), "squares": (ids.square().sum(), count)}


def load_several(**options):
    return Splits(points(96, 0), {"eval": points(33, 1), "odd": points(13, 2), "tiny": points(3, 3), "one": points(1, 4)})
"""


@pytest.fixture(scope="module")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """The numbers of a run are tested, not how its processes start: they are forks."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("loop"), environ), CODE)


@pytest.fixture(scope="module")
def points(recipe: Recipe) -> Any:
    return recipe.module()


@pytest.fixture
def fit(points: Any, tmp_path: Path) -> Callable[..., Once]:
    """Train in this process, alone: `fit(task, num_steps=8, factory=Net, evals=..., **trainer keys)`."""
    return partial(fit_alone, points, tmp_path)


@pytest.mark.parametrize("micro", ["auto", 12, 6, 1])
def test_the_weights_are_those_of_a_hand_written_loop_with_any_accumulation(
    points: Any, fit: Callable[..., Once], micro: Any
) -> None:
    once = fit(points.Sides(), micro_batch_size=micro)
    expected, losses, norms = manual(points)
    assert near(once.weights, expected, 1e-6)
    train = [record for record in once.records if "train/loss" in record]
    assert [record["train/loss"] for record in train] == pytest.approx(
        [np.mean(losses[:4]), np.mean(losses[4:])], abs=1e-6
    )
    assert [record["train/grad_norm"] for record in train] == pytest.approx([norms[3], norms[7]], rel=1e-5)
    assert not near(manual(points, num_steps=7)[0], expected, 1e-3)  # the comparison can fail


@pytest.mark.parametrize("micro", ["auto", 6])
def test_clipping_is_torchs(points: Any, fit: Callable[..., Once], micro: Any) -> None:
    once = fit(points.Sides(), micro_batch_size=micro, clip_grad_norm=0.3, log_every=1)
    expected, _, norms = manual(points, limit=0.3)
    assert near(once.weights, expected, 1e-6)
    assert max(norms) > 0.3
    found = [record["train/grad_norm"] for record in once.records if "train/grad_norm" in record]
    assert found == pytest.approx(norms, rel=1e-5)


def test_counts_that_depend_on_the_data_give_the_gradient_of_the_whole_batch(
    points: Any, fit: Callable[..., Once], recipe: Recipe
) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        total, count, _ = points.Masked().step(model, batch)
        return total / count  # type: ignore[no-any-return]

    expected, losses, _ = manual(points, loss=loss)
    once = fit(points.Masked(), micro_batch_size=4, clip_grad_norm=100.0, log_every=1)
    assert near(once.weights, expected, 1e-6)
    found = [record["train/loss"] for record in once.records if "train/loss" in record]
    assert found == pytest.approx(losses, abs=1e-5)
    done = recipe(
        "task._target_=points.Masked",
        "trainer.gpus=2",
        "trainer.micro_batch_size=4",
        "scheduler=cosine",
        "trainer.log_every=1",
    )
    assert done.code == 0, done.err
    assert near(weights(done), expected, 1e-5)
    assert [record["train/loss"] for record in done.metrics() if "train/loss" in record] == pytest.approx(
        losses, abs=1e-5
    )


def test_records_have_exactly_their_names_at_their_steps(points: Any, fit: Callable[..., Once]) -> None:
    once = fit(points.Sides(), num_steps=10, log_every=3)
    train = ["train/loss", "train/accuracy", "train/lr", "train/grad_norm", "train/samples_per_second"]
    named = {
        "train": ["step", "epoch", "time", *train],
        "eval": ["step", "epoch", "time", "eval/loss", "eval/accuracy"],
    }
    kinds = ["train" if "train/loss" in record else "eval" for record in once.records]
    assert [(kind, record["step"]) for kind, record in zip(kinds, once.records, strict=True)] == [
        ("train", 3), ("eval", 4), ("train", 6), ("eval", 8), ("train", 9), ("train", 10), ("eval", 10),
    ]  # fmt: skip
    for kind, record in zip(kinds, once.records, strict=True):
        assert [name for name in record if not name.startswith(MEASURED)] == named[kind]
        assert record["epoch"] == record["step"] / 4
    _, losses, _ = manual(points, num_steps=10)
    found = {record["step"]: record["train/loss"] for record in once.records if "train/loss" in record}
    assert found[10] == pytest.approx(losses[9], abs=1e-6)  # the last window holds one step
    assert found[9] == pytest.approx(np.mean(losses[6:9]), abs=1e-6)


@pytest.mark.parametrize(
    "values", [(2**24 + 1, 0.5), (torch.tensor(2**24 + 1), torch.tensor(0.5)), (torch.tensor(2**24 + 1), 0.5)]
)
def test_sums_of_any_kinds_are_added_in_double_precision(values: tuple[Any, Any]) -> None:
    window = MetricAccumulator(ALONE, DataRank(0, 1), [0], 1)
    for value in values:
        window.add([(torch.tensor(1.0), 1, {"name": (torch.as_tensor(value), value)})])
    window.add([(torch.tensor(2.0**24), 2, {"name": (torch.tensor(0.25), 0)})])
    assert window.totals() == {"loss": (2.0**24 + 2, 4.0), "name": (2.0**24 + 1.75, 2**24 + 1.5)}


@pytest.mark.parametrize(("every", "steps"), [("epoch", [4, 8, 10]), (5, [5, 10]), (7, [7, 10]), (0, [])])
def test_evaluation_comes_when_due_and_at_the_end(
    points: Any, fit: Callable[..., Once], every: Any, steps: list[int]
) -> None:
    once = fit(points.Sides(), num_steps=10, eval_every=every)
    assert [record["step"] for record in once.records if "eval/loss" in record] == steps


def test_the_schedule_sets_every_steps_learning_rate(points: Any, fit: Callable[..., Once]) -> None:
    once = fit(points.Sides(), log_every=1)
    rates = [record["train/lr"] for record in once.records if "train/lr" in record]
    assert rates == [0.05 * Cosine().factor(step, 8) for step in range(8)]
    assert len(set(rates)) == 8


def test_every_learning_rate_of_several_optimizers_is_recorded(points: Any, fit: Callable[..., Once]) -> None:
    class Two(points.Sides):  # type: ignore[misc]
        def optimizers(self, model: Any, make: Any) -> Any:
            weights, biases, *rest = model.parameters()
            head = torch.optim.SGD([{"params": rest[:1], "lr": 0.5}, {"params": rest[1:]}], lr=0.25)
            return {"body": make([weights, biases]), "head": head}

    once = fit(Two(), log_every=1)
    records = [record for record in once.records if "train/loss" in record]
    assert [[key for key in record if "lr" in key] for record in records] == [
        ["train/lr/body", "train/lr/head/0", "train/lr/head/1"]
    ] * 8
    for step, record in enumerate(records):
        factor = Cosine().factor(step, 8)
        assert [record[f"train/lr/{name}"] for name in ("body", "head/0", "head/1")] == [
            0.05 * factor,
            0.5 * factor,
            0.25 * factor,
        ]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_learns_and_keeps_full_weights(points: Any, fit: Callable[..., Once], precision: str) -> None:
    seen = set()

    class Looks(points.Sides):  # type: ignore[misc]
        def step(self, model: nn.Module, batch: Any) -> Any:
            seen.add(model(batch[1]).dtype)
            return super().step(model, batch)

    once = fit(Looks(), num_steps=40, precision=precision)
    assert seen == {{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]}
    assert {tensor.dtype for tensor in once.weights.values()} == {torch.float32}
    assert once.records[-1]["eval/accuracy"] > 0.85
    assert once.records[-2]["train/loss"] < once.records[0]["train/loss"] / 2
    assert near(once.weights, fit(points.Sides(), num_steps=40).weights, 0.1)


def test_random_numbers_are_a_function_of_seed_step_and_micro_batch(points: Any, fit: Callable[..., Once]) -> None:
    drawn: list[float] = []

    class Draws(points.Sides):  # type: ignore[misc]
        def step(self, model: nn.Module, batch: Any) -> Any:
            if model.training:
                drawn.append(float(torch.rand(())))
            return super().step(model, batch)

    def draws(**keys: Any) -> list[float]:
        drawn.clear()
        fit(Draws(), factory=lambda: points.Net(dropout=0.5), **keys)
        return list(drawn)

    first = draws(micro_batch_size=6)
    assert len(set(first)) == 32
    torch.rand(7)
    assert draws(micro_batch_size=6, eval_every=1) == first  # nothing that happens between the steps matters
    assert draws(micro_batch_size="auto") == first[::4]
    assert not set(draws(micro_batch_size=6, seed=1)) & set(first)


def test_no_two_micro_batches_of_a_step_have_the_same_random_numbers(points: Any, tmp_path: Path) -> None:
    """Of two workers that go through their micro-batches twice."""
    drawn = []
    for rank in range(2):
        run = loop_alone(points, tmp_path, points.Sides(), micro_batch_size=6)[0].run
        run.strategy.data = DataRank(rank, 2)
        train = replace(run.train, plan=replace(run.train.plan, data_size=2))
        step = Step(replace(run, train=train))
        for number in range(2 * step.turn_length):
            step.seed(number)
            drawn.append(float(torch.rand(())))
    assert len(set(drawn)) == 16


def test_an_optimizer_draws_other_numbers_in_each_step_and_the_same_in_each_run(
    points: Any, fit: Callable[..., Once]
) -> None:
    class Noisy(torch.optim.SGD):
        def step(self, *arguments: Any) -> Any:
            drawn.append(float(torch.rand(())))
            return super().step(*arguments)

    drawn: list[float] = []
    for _ in range(2):
        fit(points.Sides(), make=partial(Noisy, lr=0.05))
    assert drawn[:8] == drawn[8:]
    assert len(set(drawn)) == 8


class _Syncs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the operations that bring a value to the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_on_a_gpu_waits_for_nothing_but_at_a_record(
    points: Any, fit: Callable[..., Once], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpexp.train.metrics.is_host", lambda device: False)
    counts = []
    for num_steps in (5, 45):
        syncs = _Syncs()
        fit(
            points.Sides(),
            num_steps=num_steps,
            log_every=100,
            eval_every=0,
            clip_grad_norm=1.0,
            precision=precision,
            around=syncs,
        )
        counts.append(syncs.count)
    assert counts[0] == counts[1] > 0


def bad_step(index: int = 17) -> int:
    """Return the step, from 1, of the first epoch that sees a sample."""
    return int(np.flatnonzero(Permutation(96, 0, 0)(np.arange(96)) == index)[0]) // 24 + 1


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_first_step(
    points: Any, fit: Callable[..., Once], value: str
) -> None:
    # inf times the loss is an infinite loss at first, and not a number in every later step.
    with refused("loss", NonFiniteError):
        fit(points.Broken(value=value))


def test_a_gradient_that_is_not_finite_is_noticed_at_the_last_step_too(points: Any, fit: Callable[..., Once]) -> None:
    class Steep(points.Sides):  # type: ignore[misc]
        def step(self, model: Any, batch: Any) -> Any:
            loss, count, metrics = super().step(model, batch)
            return (
                loss + (model[0].weight * 0).abs().sqrt().sum(),
                count,
                metrics,
            )  # the root of 0 has an infinite slope

    with refused("norm", NonFiniteError):
        fit(Steep(), num_steps=1)


def test_skip_leaves_out_exactly_the_bad_updates(points: Any, fit: Callable[..., Once]) -> None:
    once = fit(points.Broken(), nonfinite="skip", micro_batch_size=6)
    second = int(np.flatnonzero(Permutation(96, 0, 1)(np.arange(96)) == 17)[0]) // 24 + 4
    bad = (bad_step() - 1, second)
    expected, losses, _ = manual(points, leave_out=bad)
    assert near(once.weights, expected, 1e-6)
    train = [record for record in once.records if "train/loss" in record]
    assert [record["train/skipped_steps"] for record in train] == [1, 1]
    good = [
        np.mean([loss for step, loss in enumerate(losses) if step not in bad and step // 4 == epoch])
        for epoch in (0, 1)
    ]
    assert [record["train/loss"] for record in train] == pytest.approx(good, abs=1e-6)


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_bad_sample_on_one_rank_is_bad_for_all(
    points: Any, fit: Callable[..., Once], recipe: Recipe, policy: str
) -> None:
    done = recipe(
        "task._target_=points.Broken",
        "trainer.gpus=2",
        "trainer.micro_batch_size=6",
        "scheduler=cosine",
        f"trainer.nonfinite={policy}",
    )
    if policy == "stop":
        assert (done.code, done.result()["status"]) == (1, "failed")
        assert done.err.count(f"NonFiniteError: train/loss is nan at step {bad_step()}: ") == 1
        assert "Traceback" not in done.err
        return
    assert done.code == 0, done.err
    assert near(weights(done), fit(points.Broken(), nonfinite="skip", micro_batch_size=6).weights, 1e-5)


@dataclass(frozen=True)
class Recorded:
    """A run of `Records`: what each rank wrote down at each call."""

    done: Done
    calls: list[list[dict[str, Any]]]

    def samples(self) -> list[list[int]]:
        """Return each step's samples, ranks in order."""
        trained = [[call["ids"] for call in calls if call["train"]] for calls in self.calls]
        accumulation = len(trained[0]) // 8
        return [
            [
                index
                for calls in trained
                for ids in calls[step * accumulation : (step + 1) * accumulation]
                for index in ids
            ]
            for step in range(8)
        ]


CUTS = [(1, "auto"), (1, "6"), (2, "auto"), (2, "6"), (4, "6"), (4, "3")]


@pytest.fixture(scope="module")
def recorded(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], Recorded]:
    runs = {}
    for size, micro in CUTS:
        folder = tmp_path_factory.mktemp("records")
        task = ("task._target_=points.Records", f"+task.folder={folder}", "scheduler=cosine")
        done = recipe(*task, f"trainer.gpus={size}", f"trainer.micro_batch_size={micro}")
        assert done.code == 0, done.err
        lines = [(folder / str(rank)).read_text().splitlines() for rank in range(size)]
        runs[size, micro] = Recorded(done, [[json.loads(line) for line in calls] for calls in lines])
    return runs


@pytest.mark.parametrize("cut", CUTS)
def test_a_step_sees_the_same_samples_in_the_same_order_at_every_world_size(
    recorded: dict[tuple[int, str], Recorded], cut: tuple[int, str]
) -> None:
    expected = [
        Permutation(96, 0, step // 4)(np.arange(step % 4 * 24, step % 4 * 24 + 24)).tolist() for step in range(8)
    ]
    assert recorded[cut].samples() == expected


@pytest.mark.parametrize("cut", CUTS)
def test_workers_agree_with_one_and_with_a_hand_written_loop(
    points: Any, recorded: dict[tuple[int, str], Recorded], cut: tuple[int, str]
) -> None:
    assert near(weights(recorded[cut].done), manual(points)[0], 1e-5)
    found, alone = recorded[cut].done.metrics(), recorded[1, "auto"].done.metrics()
    for name in ("train/loss", "train/accuracy", "train/grad_norm", "eval/loss", "eval/accuracy"):
        expected = [record[name] for record in alone if name in record]
        assert [record[name] for record in found if name in record] == pytest.approx(expected, rel=1e-4), name


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut[0] > 1])
def test_the_ranks_talk_once_a_step_and_else_only_at_records_evaluations_and_comparisons(
    recorded: dict[tuple[int, str], Recorded], cut: tuple[int, str]
) -> None:
    for calls in recorded[cut].calls:
        trained = [call for call in calls if call["train"]]
        accumulation = len(trained) // 8
        assert [call["reductions"] for call in trained] == [step for step in range(8) for _ in range(accumulation)]
        others = [call["collectives"] for call in trained]  # a reduction is none, for it goes through memory
        # Replicas are compared after the first step. Between the steps 4 and 5 lie a record, an evaluation and, before
        # a checkpoint, another comparison. Each has one sum.
        expected = [count for count in (0, 1, 1, 1, 4, 4, 4, 4) for _ in range(accumulation)]
        assert [count - others[0] for count in others] == expected


def test_memory_that_a_step_frees_is_there_for_the_next_one(recipe: Recipe, tmp_path: Path) -> None:
    done = recipe("task._target_=points.Large", f"+task.folder={tmp_path}", "trainer.gpus=2", "trainer.eval_every=0")
    assert done.code == 0, done.err
    for rank in range(2):
        faults = [int(line) for line in (tmp_path / str(rank)).read_text().split()]
        assert max(after - before for before, after in itertools.pairwise(faults[2:])) < 2000  # of 4,096 pages


def test_several_networks_under_manual_optimization_train_alike_at_every_world_size(
    points: Any, fit: Callable[..., Once], recipe: Recipe
) -> None:
    done = recipe(
        "task._target_=points.Pair", "model._target_=points.pair", "~model.hidden", "~model.dropout",
        "scheduler=cosine",
        "trainer.gpus=2", "trainer.micro_batch_size=6",
    )  # fmt: skip
    assert done.code == 0, done.err
    alone = fit(points.Pair(), factory=points.pair)
    assert set(alone.loop.run.optimizers) == {"left", "right"}
    assert near(weights(done), alone.weights, 1e-5)
    # What `right`'s loss leaves in `left` does not reach its next step: it learns as if it were alone.
    torch.manual_seed(0)
    left = points.pair()["left"].state_dict()
    torch.manual_seed(0)
    single = points.Net().state_dict()
    assert all(torch.equal(left[name], single[name]) for name in single)
    expected = {name.replace("model", "left"): tensor for name, tensor in manual(points)[0].items()}
    assert near({name: tensor for name, tensor in alone.weights.items() if name.startswith("left")}, expected, 1e-6)


@pytest.mark.parametrize("size", [1, 4])
def test_evaluation_counts_each_sample_once_in_every_named_set(recipe: Recipe, size: int) -> None:
    done = recipe(
        "task._target_=points.Sums", "data._target_=points.load_several", "data.validation_fraction=0.1",
        f"trainer.gpus={size}",
        "trainer.micro_batch_size=2", "trainer.global_batch_size=8", "trainer.max_steps=1",
    )  # fmt: skip
    assert done.code == 0, done.err
    metrics = done.result()["metrics"]
    order = Permutation(96, 0, 0)(np.arange(96))
    sets = {
        "eval": np.arange(33),
        "odd": np.arange(13),
        "tiny": np.arange(3),
        "one": np.arange(1),
        "validation": order[86:],
    }
    assert set(metrics) == {f"{name}/{key}" for name in sets for key in ("loss", "ids", "squares")}
    for name, ids in sets.items():
        assert metrics[f"{name}/ids"] == pytest.approx(ids.mean(), rel=1e-12)
        assert metrics[f"{name}/squares"] == pytest.approx(np.square(ids).mean(), rel=1e-12)
