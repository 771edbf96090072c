"""Metrics of evaluations that are no means: the same bits at every number of workers, and errors by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryAveragePrecision,
    BinaryF1Score,
    MulticlassConfusionMatrix,
)
from torchmetrics.retrieval import RetrievalMRR
from torchmetrics.text import Perplexity

from ddpexp.data.batches import EvalBatches
from ddpexp.data.datasets import Arrays
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from ddpexp.launch.workers.control import Control
from ddpexp.strategy.mesh import DataRank
from ddpexp.system.hardware import count_gpus
from ddpexp.task import metric_update
from ddpexp.train import batch_states
from ddpexp.train.evaluate import Evaluator, metric_names
from ddpexp.train.metrics import MetricError
from ddpexp.train.precision import Precision
from ddpexp.train.task_step import CurrentProgress
from tests.fitting import ALONE
from tests.ranks import on_ranks
from tests.refusals import located, refused

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics")
FP32 = Precision("fp32", ALONE.device, False)
Entry = Callable[[Tensor, Tensor], Any]


class Fetched(Arrays):
    """Samples that are fetched as images are: no random number generator is seeded for them."""

    fetches_ahead = True


def samples(count: int) -> Arrays:
    """Scores of all magnitudes, so that the order of a sum decides its last bits."""
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, 4, generator=generator) * 10.0 ** torch.randint(-3, 4, (count, 1), generator=generator)
    return Fetched((rows, torch.randint(0, 4, (count,), generator=generator)))


@dataclass
class Counts:
    """A task whose metrics are made by functions of the scores and the labels."""

    entries: Mapping[str, Entry]
    seen: list[Any] = field(default_factory=list)

    def step(self, model: Any, batch: Any) -> Any:
        scores = model(batch[0])
        loss = nn.functional.cross_entropy(scores, batch[1], reduction="sum")
        hits = (scores.argmax(1) == batch[1]).sum()
        others = {} if model.training else {name: entry(scores, batch[1]) for name, entry in self.entries.items()}
        return loss, len(scores), {"accuracy": (hits, len(scores)), **others}


@dataclass
class Finishes(Counts):
    """The same, with a `finish`."""

    ends: Callable[[Mapping[str, Any]], Any] = lambda sums: {}

    def finish(self, sums: Mapping[str, Any]) -> Any:
        self.seen.append(sums)
        return self.ends(sums)


class Stops(Control):
    """A rank that is asked to stop before its n-th batch."""

    def __init__(self, after: int | None) -> None:
        super().__init__(None)
        self.left = math.inf if after is None else after

    @property
    def stop_requested(self) -> bool:
        self.left -= 1
        return self.left < 0


def run(
    task: Any, world: World = ALONE, count: int = 103, data: DataRank | None = None, after: int | None = None
) -> dict[str, float] | None:
    rank = data or DataRank(world.rank, world.world_size)
    batches = EvalBatches(samples(count), 8, rank.rank, rank.size, world.device)
    return Evaluator(task, FP32, world, rank, Stops(after), CurrentProgress()).evaluate(
        nn.Identity().eval(), {"eval": batches}
    )


def chances(scores: Tensor) -> Tensor:
    return scores.softmax(1)[:, 1]


def everything() -> Finishes:
    """Every kind of metric at once."""
    auroc, binned = BinaryAUROC(), BinaryAUROC(thresholds=7)
    f1, confusion = BinaryF1Score(), MulticlassConfusionMatrix(4)
    perplexity, ranks = Perplexity(), torchmetrics.SpearmanCorrCoef()
    most, least, mean = torchmetrics.MaxMetric(), torchmetrics.MinMetric(), torchmetrics.MeanMetric()
    hits = RetrievalMRR()
    both = torchmetrics.MetricCollection({"ap": BinaryAveragePrecision(), "auroc": BinaryAUROC()}, prefix="my_")
    entries: dict[str, Entry] = {
        "matrix": lambda scores, labels: torch.bincount(labels * 4 + scores.argmax(1), minlength=16).view(4, 4),
        "positives": lambda scores, labels: (labels == 1).sum(),
        "drawn": lambda scores, labels: (torch.rand(len(scores)).sum().to(scores.device), len(scores)),
        "mean_scores": lambda scores, labels: ((scores.double() / 3).sum(0), len(scores)),
        "by_class": lambda scores, labels: (
            torch.zeros(4).index_add_(0, labels, scores[:, 0]), torch.bincount(labels, minlength=4)
        ),
        "auroc": lambda scores, labels: metric_update(auroc, chances(scores), labels == 1),
        "binned": lambda scores, labels: metric_update(binned, chances(scores), labels == 1),
        "f1": lambda scores, labels: metric_update(f1, chances(scores), labels == 1),
        "confusion": lambda scores, labels: metric_update(confusion, scores, labels),
        "perplexity": lambda scores, labels: metric_update(perplexity, preds=scores[None], target=labels[None]),
        "ranks": lambda scores, labels: metric_update(ranks, scores[:, 0], scores[:, 1]),
        "most": lambda scores, labels: metric_update(most, scores),
        "least": lambda scores, labels: metric_update(least, scores),
        "mean": lambda scores, labels: metric_update(mean, scores),
        "mrr": lambda scores, labels: metric_update(hits, chances(scores), labels == 1, indexes=labels % 2),
        "both": lambda scores, labels: metric_update(both, chances(scores), labels == 1),
    }  # fmt: skip

    def ends(sums: Mapping[str, Any]) -> dict[str, Any]:
        total, count = sums["loss"]
        matrix = sums["matrix"]
        values = {"exp_loss": math.exp(total / count / 1e4), "recall": matrix[1, 1] / matrix[1].sum()}
        values |= {f"mean_{i}": value / sums["mean_scores"][1] for i, value in enumerate(sums["mean_scores"][0])}
        by_class = sums["by_class"]
        values |= {f"class_{i}": value for i, value in enumerate(by_class[0] / by_class[1])}
        return values | {"positives": int(sums["positives"]), "diagonal": sums["confusion"].trace().numpy()}

    return Finishes(entries, ends=ends)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that are folded after every second round, and exchanged a few numbers at a time."""
    monkeypatch.setattr(batch_states, "KEPT_BYTES", 400)
    monkeypatch.setattr(batch_states, "PIECE_BYTES", 200)


CASES = (103, 10, 3)  # samples: an uneven last batch, and fewer batches than ranks


@pytest.fixture(scope="module")
def alone() -> dict[int, dict[str, float]]:
    """The values of a single process."""
    values = {count: run(everything(), count=count) for count in CASES}
    return {count: found for count, found in values.items() if found is not None}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_metric_has_the_same_bits_at_every_number_of_workers(
    tmp_path: Path, alone: dict[int, dict[str, float]], small_pieces: None, size: int
) -> None:
    assert len(alone[103]) == 26
    for found in on_ranks(tmp_path, size, lambda world: [run(everything(), world, count) for count in CASES]):
        assert not isinstance(found, str), found
        for count, values in zip(CASES, found, strict=True):
            assert repr(values) == repr(alone[count])  # repr: NaN is equal to itself


def test_the_values_are_those_of_a_metric_that_gets_all_batches_in_order(alone: dict[int, dict[str, float]]) -> None:
    values, (rows, labels) = alone[103], samples(103).tensors
    probability, positive = chances(rows), labels == 1
    assert values["eval/auroc"] == values["eval/both/my_auroc"] == float(BinaryAUROC()(probability, positive))
    assert values["eval/both/my_ap"] == float(BinaryAveragePrecision()(probability, positive))
    assert values["eval/f1"] == float(BinaryF1Score()(probability, positive))
    assert values["eval/diagonal"] == float(MulticlassConfusionMatrix(4)(rows, labels).trace())
    assert values["eval/perplexity"] == pytest.approx(float(Perplexity()(rows[None], labels[None])), rel=1e-5)
    assert values["eval/ranks"] == float(torchmetrics.SpearmanCorrCoef()(rows[:, 0], rows[:, 1]))
    assert (values["eval/most"], values["eval/least"]) == (float(rows.max()), float(rows.min()))
    assert values["eval/mean"] == pytest.approx(float(rows.mean()), rel=1e-5)
    assert values["eval/recall"] == float(((rows.argmax(1) == 1) & positive).sum() / positive.sum())
    assert values["eval/positives"] == int(positive.sum())
    assert 0.4 < values["eval/drawn"] < 0.6
    assert values["eval/class_2"] == pytest.approx(float(rows[labels == 2, 0].mean()), rel=1e-6)
    assert "eval/confusion" not in values
    assert "eval/matrix" not in values


@pytest.mark.gpu
@pytest.mark.skipif(count_gpus() == 0, reason="there is no GPU here")
def test_a_gpu_gives_the_values_of_the_host(alone: dict[int, dict[str, float]]) -> None:
    values = run(everything(), replace(ALONE, device=torch.device("cuda", 0)))
    assert values is not None
    assert values == pytest.approx(alone[103], rel=1e-4)


def test_a_task_without_such_metrics_communicates_as_often_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(world: World) -> int:
        calls: list[Tensor] = []
        real = World.sum

        def noted(self: World, tensor: Tensor) -> Tensor:
            calls.append(tensor)
            return real(self, tensor)

        monkeypatch.setattr(World, "sum", noted)
        monkeypatch.setattr(World, "broadcast", noted)
        run(Counts({}), world)
        return len(calls)

    assert on_ranks(tmp_path, 2, counted) == [1, 1]


@pytest.mark.parametrize(("rank", "after"), [(0, 0), (1, 1), (2, 2)])
def test_a_stop_request_on_any_rank_ends_an_evaluation_on_all(
    tmp_path: Path, small_pieces: None, rank: int, after: int
) -> None:
    def stopped(world: World) -> Any:
        return run(everything(), world, after=after if world.rank == rank else None)

    assert on_ranks(tmp_path, 3, stopped) == [None] * 3


def test_ranks_that_share_a_batch_count_it_once(tmp_path: Path, alone: dict[int, dict[str, float]]) -> None:
    def shared(world: World) -> Any:
        return run(everything(), world, data=DataRank(world.rank // 2, 2, reports=world.rank % 2 == 0))

    assert [repr(values) for values in on_ranks(tmp_path, 4, shared)] == [repr(alone[103])] * 4


def test_ranks_with_different_metrics_are_refused(tmp_path: Path) -> None:
    def differing(world: World) -> Any:
        run(Finishes({f"matrix{world.rank}": lambda scores, labels: labels.sum()}), world)

    for text in on_ranks(tmp_path, 2, differing):
        assert text.startswith("DdpexpError: Counts.step (")
        assert "returned other metrics on rank" in text


def test_what_finish_raises_is_the_error_of_all_ranks(tmp_path: Path) -> None:
    def failing(world: World) -> Any:
        task = Finishes({}, ends=lambda sums: {"f1": sums["tp"]})
        with pytest.raises(MetricError) as caught:
            run(task, world)
        return str(caught.value), len(task.seen)

    (message, calls), other = on_ranks(tmp_path, 2, failing)
    assert "Finishes.finish (" in message
    assert "raised KeyError: 'tp'; sums holds loss, accuracy." in message
    assert (calls, other) == (1, (message, 0))


def test_finish_gets_every_sum_on_the_host() -> None:
    task = everything()
    run(task)
    sums = task.seen[0]
    assert list(sums)[:2] == ["loss", "accuracy"]
    assert sums["loss"][1] == 103
    assert sums["matrix"].dtype == torch.int64
    assert int(sums["matrix"].sum()) == 103
    assert sums["mean_scores"][0].dtype == torch.float64
    assert sums["mean_scores"][1] == 103
    assert sums["confusion"].shape == (4, 4)
    assert set(sums["both"]) == {"my_ap", "my_auroc"}


WRONG: Mapping[str, tuple[Callable[[Mapping[str, Any]], Any], str]] = {
    "nothing": (lambda sums: None, "returned None"),
    "a list": (lambda sums: [1.0], "returned a list of 1"),
    "a matrix": (lambda sums: {"m": torch.zeros(2, 2)}, "returned a tensor of shape (2, 2) as 'm'"),
    "a text": (lambda sums: {"m": "1"}, "returned a str as 'm'"),
    "no name": (lambda sums: {1: 1.0}, "returned a metric named 1"),
    "a mean": (lambda sums: {"accuracy": 1.0}, "gives accuracy"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_finish_that_returns_something_else_is_named_with_its_file_and_line(kind: str) -> None:
    ends, message = WRONG[kind]
    with refused(f"{located(Finishes.finish)}: {message}", MetricError):
        run(Finishes({}, ends=ends))


def test_arrays_that_nothing_finishes_are_refused() -> None:
    with refused(f"{located(Counts.step)}: returns a, b", MetricError):
        run(Counts({"a": lambda scores, labels: labels.sum(), "b": lambda scores, labels: (scores.sum(0), 1)}))


@pytest.mark.parametrize(
    "entry",
    [lambda scores, labels: scores.sum(0), lambda scores, labels: scores.sum(), lambda scores, labels: (scores, "1")],
)
def test_floats_without_a_count_are_refused(entry: Entry) -> None:
    with refused(f"{located(Counts.step)}: the metric 'a'", DdpexpError):
        run(Counts({"a": entry}))


def test_the_order_of_the_entries_does_not_matter(alone: dict[int, dict[str, float]]) -> None:
    class Turns(Finishes):
        def step(self, model: Any, batch: Any) -> Any:
            self.entries = dict(reversed(list(self.entries.items())))
            return super().step(model, batch)

    task = everything()
    assert run(Turns(task.entries, ends=task.ends)) == alone[103]


def test_a_shape_that_changes_is_refused() -> None:
    with refused(f"{located(Counts.step)}: returned the metrics a in another number", DdpexpError):
        run(Finishes({"a": lambda scores, labels: torch.zeros(len(labels), dtype=torch.int64)}))


class Running(torchmetrics.Metric):
    """A metric whose update depends on the batches before."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, scores: Tensor) -> None:
        self.total = 0.9 * self.total + scores.mean()

    def compute(self) -> Tensor:
        return self.total


class Custom(Running):
    """A metric whose state is reduced in a way of its own."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.add_state("odd", torch.tensor(0.0), dist_reduce_fx=function)


def product(values: Tensor) -> Tensor:
    return values.prod(0)


UNMERGEABLE: Mapping[str, tuple[Any, str]] = {
    "tensors that are stacked": (torchmetrics.PearsonCorrCoef(), "`mean_x` has dist_reduce_fx=None"),
    "a function": (Custom(product), "`odd` has dist_reduce_fx=product"),
    "one that remembers": (Running(), "an update of its state `total`"),
    "one in a collection": (torchmetrics.MetricCollection([BinaryAUROC(), Custom(None)]), "Custom cannot be merged"),
    "no metric": (nn.Linear(1, 1), "not a Linear"),
}


@pytest.mark.parametrize("kind", UNMERGEABLE)
def test_a_metric_that_cannot_be_merged_is_refused_by_name(kind: str) -> None:
    metric, message = UNMERGEABLE[kind]

    def update(scores: Tensor, labels: Tensor) -> Any:
        both = isinstance(metric, torchmetrics.PearsonCorrCoef | torchmetrics.MetricCollection)
        return metric_update(metric, *([scores[:, 0], scores[:, 1]] if both else [scores]))

    with refused(f"metric 'odd': {message}", DdpexpError):
        run(Counts({"odd": update}))


def test_a_metric_that_does_not_accept_a_batch_is_named() -> None:
    matrix = MulticlassConfusionMatrix(3)
    with refused("metric 'matrix': MulticlassConfusionMatrix.update raised ValueError", DdpexpError):
        run(Counts({"matrix": lambda scores, labels: metric_update(matrix, scores, labels)}))


def test_names_may_have_any_characters() -> None:
    auroc = BinaryAUROC()
    entry: Entry = lambda scores, labels: metric_update(auroc, chances(scores), labels == 1)  # noqa: E731
    values = run(Counts({"a": entry, "a|b": entry, "a/b.c": entry}))
    assert values is not None
    assert values["eval/a"] == values["eval/a|b"] == values["eval/a/b.c"]


def test_the_users_metric_stays_as_it_is() -> None:
    auroc = BinaryAUROC()
    auroc.update(torch.tensor([0.1, 0.9]), torch.tensor([0, 1]))
    run(Counts({"auroc": lambda scores, labels: metric_update(auroc, chances(scores), labels == 1)}))
    assert float(auroc.compute()) == 1.0
    assert auroc.update_count == 1


def names(task: Any) -> list[str] | None:
    model = nn.Identity()
    batch = samples(8).tensors
    return metric_names(task, model, {"model": model}, batch, FP32, ALONE.device, CurrentProgress())


@dataclass
class Holds:
    """A task that holds a metric."""

    metric: Any

    def step(self, model: Any, batch: Any) -> Any:
        return torch.zeros(()), 1, {"auroc": metric_update(self.metric, chances(batch[0]), batch[1] == 1)}


def test_the_names_of_an_evaluation_are_tried_out_on_a_batch() -> None:
    assert names(Holds(BinaryAUROC())) == ["loss", "auroc"]
    with refused("metric 'auroc': the states of PearsonCorrCoef", DdpexpError):
        names(Holds(torchmetrics.PearsonCorrCoef()))
