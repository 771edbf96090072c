"""What a task returns: named with its file and line when it is not what the loop expects.

And means distinguished from sums.
"""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddpexp.errors import DdpexpError
from ddpexp.strategy.mesh import DataRank
from ddpexp.task import metric_update
from ddpexp.train.metrics import MetricAccumulator
from ddpexp.train.precision import Precision
from ddpexp.train.task_checks import mean_for_a_sum, named
from ddpexp.train.task_step import CurrentProgress
from tests.conftest import Ddpexp
from tests.fitting import ALONE, Once, fit_alone
from tests.points import Recipe
from tests.refusals import located, refused


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What is wrong with a task is tested, not how a rank starts."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("contract"), environ))


@pytest.fixture(scope="module")
def points(recipe: Recipe) -> Any:
    return recipe.module()


@pytest.fixture
def fit(points: Any, tmp_path: Path) -> Callable[..., Once]:
    """Train in this process, alone: `fit(task, num_steps=8, factory=Net, evals=..., **trainer keys)`."""
    return partial(fit_alone, points, tmp_path)


def good(model: Any, batch: Any) -> tuple[Tensor, int, dict[str, Any]]:
    _, rows, labels = batch
    scores = model(rows)
    loss = nn.functional.cross_entropy(scores, labels, reduction="sum")
    return loss, len(labels), {"accuracy": ((scores.argmax(1) == labels).sum(), len(labels))}


class Wrong:
    """A task that makes something else of what is right."""

    def __init__(self, change: Callable[..., Any], training: bool = True) -> None:
        self.change = change
        self.training = training

    def step(self, model: Any, batch: Any) -> Any:
        return self.change(*good(model, batch)) if model.training == self.training else good(model, batch)


WRONG = {
    "a bare loss": (lambda loss, n, _: loss, "a single tensor, where"),
    "nothing": (lambda loss, n, _: None, "None, where"),
    "a pair": (lambda loss, n, _: (loss, n), "a tuple of 2, where"),
    "a mapping": (lambda loss, n, _: {"loss": loss}, "a dict, where"),
    "a number for a loss": (lambda loss, n, rest: (loss.item(), n, rest), "a float as the loss"),
    "a loss of each sample": (lambda loss, n, rest: (loss.expand(n), n, rest), "a tensor of shape (24,) as the loss"),
    "a count of each": (lambda loss, n, rest: (loss, torch.ones(n), rest), "a tensor of shape (24,) as the count"),
    "no count": (lambda loss, n, rest: (loss, None, rest), "None as the count"),
    "no mapping": (lambda loss, n, rest: (loss, n, [("accuracy", 1, 2)]), "a list of 1 as the metrics"),
    "a metric alone": (lambda loss, n, rest: (loss, n, {"hits": loss}), "a single tensor as the metric 'hits'"),
    "a metric of each": (lambda loss, n, rest: (loss, n, {"hits": ([1.0, 2.0], 2)}), "a list of 2 in the pair"),
    "a second loss": (lambda loss, n, rest: (loss, n, {"loss": (loss, n)}), "a metric named 'loss'"),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", WRONG)
def test_a_task_that_returns_something_else_is_named_with_its_file_and_line(
    fit: Callable[..., Once], kind: str, training: bool
) -> None:
    change, message = WRONG[kind]
    with refused(f"{located(Wrong.step)}: returned {message}", DdpexpError) as raised:
        fit(Wrong(change, training), evals=None)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        ((torch.ones(3), 3), "a tensor of shape (3,) in the pair of the metric 'hits'"),
        (torch.ones(3, dtype=torch.int64), "a tensor of shape (3,) as the metric 'hits'"),
        (metric_update(None), "a MetricUpdate as the metric 'hits'"),
    ],
)
def test_arrays_and_torchmetrics_are_refused_in_training(fit: Callable[..., Once], entry: Any, shown: str) -> None:
    with refused(f"{located(Wrong.step)}: returned {shown}", DdpexpError) as raised:
        fit(Wrong(lambda loss, n, rest: (loss, n, {"hits": entry})))
    assert "if not model.training" in raised.value.reason


def test_a_loss_that_teaches_nothing_is_named(fit: Callable[..., Once]) -> None:
    with refused(f"{located(Wrong.step)}: a loss that does not require a gradient", DdpexpError):
        fit(Wrong(lambda loss, count, metrics: (loss.detach(), count, metrics)))


NO_GRADIENT: Any = (torch.zeros(()), 24, {})


class ByHand:
    """A task's own train_step, which goes back from `loss` and returns `found`."""

    def __init__(self, loss: Callable[[Tensor], Any] = lambda loss: loss, found: Any = NO_GRADIENT) -> None:
        self.loss, self.found = loss, found

    def train_step(self, update: Any, batches: list[Any]) -> Any:
        with update.micro_batch(last=True) as micro_batch:
            loss, count, _ = good(update.models, batches[0])
            micro_batch.backward(self.loss(loss), count)
        update.apply()
        return self.found

    def step(self, model: Any, batch: Any) -> Any:
        return good(model, batch)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (ByHand(found=None), "returned None"),
        (ByHand(found=(1.0, 24, {})), "returned a float as the loss"),
        (ByHand(lambda loss: loss.expand(3)), "gave micro_batch.backward a tensor of shape (3,) as the loss"),
        (ByHand(lambda loss: loss.detach()), "gave micro_batch.backward a loss that does not require a gradient"),
    ],
)
def test_a_tasks_own_train_step_is_looked_at_too(fit: Callable[..., Once], task: ByHand, message: str) -> None:
    with refused(f"{located(ByHand.train_step)}: {message}", DdpexpError):
        fit(task)
    fit(ByHand())  # whose loss needs no gradient


class Twice:
    """A task that runs the backward pass itself."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def step(self, model: Any, batch: Any) -> Any:
        loss, count, metrics = good(model, batch)
        if model.training:
            loss.backward(**self.options)  # type: ignore[no-untyped-call]
        return loss, count, metrics


class OnItsOwn(ByHand):
    """A task's own train_step that runs the backward pass without micro_batch.backward."""

    def train_step(self, update: Any, batches: list[Any]) -> Any:
        with update.micro_batch(last=True):
            good(update.models, batches[0])[0].backward()  # type: ignore[no-untyped-call]
        update.apply()
        return self.found


@pytest.mark.parametrize("options", [{}, {"retain_graph": True}])
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_a_task_that_runs_the_backward_pass_is_named_with_the_line(
    fit: Callable[..., Once], reduction: str, options: dict[str, bool]
) -> None:
    line = inspect.getsourcelines(Twice.step)[1]
    with refused(f"{located(Twice.step)}: in line {line + 3}", DdpexpError):
        fit(Twice(**options), reduction=reduction, micro_batch_size=6)


def test_a_train_step_that_runs_the_backward_pass_without_its_count_is_named(fit: Callable[..., Once]) -> None:
    line = inspect.getsourcelines(OnItsOwn.train_step)[1]
    with refused(f"{located(OnItsOwn.train_step)}: in line {line + 2}", DdpexpError):
        fit(OnItsOwn())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("names", [("accuracy", "odd"), (), ("odd",)])
def test_metrics_that_change_their_names_are_named(
    fit: Callable[..., Once], training: bool, names: tuple[str, ...]
) -> None:
    calls: list[int] = []

    def change(loss: Tensor, count: int, metrics: Any) -> Any:
        calls.append(count)
        changed = len(calls) > 1 if training else count == 3  # the last batch of the set
        return loss, count, dict.fromkeys(names, (loss.detach(), count)) if changed else metrics

    now = ", ".join(names) or "none"
    with refused(f"{located(Wrong.step)}: the metrics {now} after accuracy", DdpexpError):
        fit(Wrong(change, training), micro_batch_size=6, log_every=1)


def test_what_waits_for_a_record_survives_a_change_of_the_recipes_metrics() -> None:
    before, window = MetricAccumulator(ALONE, DataRank(0, 1), [0], 1), MetricAccumulator(ALONE, DataRank(0, 1), [0], 1)
    before.add([(torch.tensor(1.0), 2, {"gone": (torch.tensor(5.0), 2), "kept": (torch.tensor(1.0), 2)})])
    window.restore(before.state())
    assert window.state()[0]["names"] == ["gone", "kept"]
    window.add([(torch.tensor(3.0), 2, {"kept": (torch.tensor(0.0), 2), "new": (torch.tensor(3.0), 1)})])
    assert window.totals() == {"loss": (4.0, 4.0), "kept": (1.0, 4.0), "new": (3.0, 1.0)}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if (record.name, record.levelname) == ("ddpexp", "WARNING")
    ]


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("ddpexp"), "propagate", True)
    return caplog


class Mean:
    def step(self, model: Any, batch: Any) -> Any:
        loss, count, metrics = good(model, batch)
        return loss / count, count, metrics


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_task_that_returns_a_mean_for_a_sum_is_warned_of_once(
    fit: Callable[..., Once], caplog: pytest.LogCaptureFixture, precision: str
) -> None:
    fit(Mean(), precision=precision, micro_batch_size=12)
    [warning] = warnings_of(caplog)
    assert warning.startswith(
        f"Mean.step ({__file__}:{inspect.getsourcelines(Mean.step)[1]}) seems to return the mean of the loss"
    )
    assert "the gradient is 12 times too small" in warning


def failing(loss: Tensor, count: int, _: Any) -> Any:
    if count != 24:
        raise ValueError("a batch of 24, always")
    return loss / count, count, {}


@pytest.mark.parametrize(
    "change",
    [
        lambda loss, count, metrics: (loss, count, metrics),
        lambda loss, count, metrics: (loss / count, 1, {}),  # a mean over micro-batches, which is what that says
        lambda loss, count, metrics: (loss.sqrt(), count, {}),
        lambda loss, count, metrics: (loss * 0, count, {}),
        lambda loss, count, metrics: (loss * torch.inf, count, {}),
        lambda loss, count, metrics: (loss / count, 24, {}),
        failing,
    ],
)
def test_nothing_else_is_warned_of(fit: Callable[..., Once], caplog: pytest.LogCaptureFixture, change: Any) -> None:
    class Both:
        def step(self, model: Any, batch: Any) -> Any:
            return change(*good(model, batch))

    fit(Both(), num_steps=1, nonfinite="skip", eval_every=0)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("held", [nn.BatchNorm1d(2), [nn.Linear(1, 1)], {"a": object()}])
def test_a_task_that_holds_more_than_plain_values_is_not_called(fit: Callable[..., Once], held: Any) -> None:
    calls = []

    class Holds(Mean):
        def __init__(self) -> None:
            self.held = held

        def step(self, model: Any, batch: Any) -> Any:
            calls.append(model.training)
            return super().step(model, batch)

    fit(Holds(), num_steps=1, eval_every=0)
    assert calls == [True]


class Pair(NamedTuple):
    rows: Any
    labels: Any


def is_warned_of(batch: Any, read: Callable[[Any], tuple[Tensor, Tensor]]) -> bool:
    class Reads:
        def step(self, model: Any, batch: Any) -> Any:
            rows, labels = read(batch)
            return nn.functional.cross_entropy(model(rows), labels), len(rows), {}

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return (
        mean_for_a_sum(
            Reads(),
            model,
            {"model": model},
            batch,
            Precision("fp32", ALONE.device, False),
            ALONE.device,
            CurrentProgress(),
        )
        is not None
    )


def test_batches_of_any_nest_are_cut() -> None:
    rows, labels = torch.randn(7, 4), torch.arange(7) % 2
    assert is_warned_of((rows, labels), lambda batch: (batch[0], batch[1]))
    assert is_warned_of([{"rows": rows}, (labels,)], lambda batch: (batch[0]["rows"], batch[1][0]))
    assert is_warned_of(Pair(rows, labels), lambda batch: (batch.rows, batch.labels))
    assert not is_warned_of((rows, labels, "a text"), lambda batch: (batch[0], batch[1]))
    assert not is_warned_of((rows, labels, torch.tensor(1)), lambda batch: (batch[0], batch[1]))
    assert not is_warned_of((rows, labels, torch.zeros(3)), lambda batch: (batch[0], batch[1]))
    assert not is_warned_of((rows[:1], labels[:1]), lambda batch: (batch[0], batch[1]))
    assert not is_warned_of((), lambda batch: (rows, labels))


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_the_question_changes_nothing(
    points: Any, fit: Callable[..., Once], reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noisy(points.Sides):  # type: ignore[misc]
        calls = 0

        def step(self, model: Any, batch: Any) -> Any:
            self.calls += 1
            ids, rows, labels = batch
            noise = np.random.rand() + random.random() + float(torch.rand(()))
            return super().step(model, (ids, rows + 0.1 * noise, labels))

    def net() -> nn.Module:
        layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        layers.register_module("frozen", nn.Dropout(0.5).eval())
        return layers

    def run() -> tuple[dict[str, Tensor], list[bool], int, float, float]:
        np.random.seed(0)
        random.seed(0)
        once = fit(task := Noisy(), factory=net, micro_batch_size=6, reduction=reduction, eval_every=0)
        modes = [module.training for module in once.loop.run.strategy.modules["model"].modules()]
        return once.weights, modes, task.calls, np.random.rand(), random.random()

    checked = run()
    monkeypatch.setattr("ddpexp.train.loop.warn_of_a_mean", lambda *_: None)
    alone = run()
    assert all(torch.equal(checked[0][name], tensor) for name, tensor in alone[0].items())
    assert checked[1:] == alone[1:]


def test_a_function_is_named_whatever_it_is() -> None:
    assert named(good) == f"good ({__file__}:{inspect.getsourcelines(good)[1]})"
    assert named(Mean().step).startswith("Mean.step (")
    assert named(partial(good, None)) == "partial"
