"""trainer.compile_step: micro-batches and updates as graphs, with the numbers of steps as they are written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpexp.compat import compiler
from ddpexp.errors import DdpexpError
from ddpexp.settings.parameters import FreezeUntil
from ddpexp.train import compiled_update
from ddpexp.train.compilations import Compilations
from ddpexp.train.loop import Loop
from tests.conftest import Ddpexp
from tests.fitting import Once, fit_alone, loop_alone, near, sgd
from tests.points import Recipe
from tests.refusals import located, refused


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Any:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("compiled"), environ)).module()


class Sides:
    """The task of the recipe `points`, of a module that torch's compiler can import."""

    def step(self, model: Any, batch: Any) -> Any:
        """Return the cross entropy."""
        _, rows, labels = batch
        scores = model(rows)
        loss = nn.functional.cross_entropy(scores, labels, reduction="sum")
        return loss, len(labels), {"accuracy": ((scores.argmax(1) == labels).sum(), len(labels))}


@pytest.fixture
def fit(points: Any, tmp_path: Path) -> Callable[..., Once]:
    return partial(fit_alone, points, tmp_path, eval_every=0)


@pytest.fixture
def compilations() -> Iterator[Compilations]:
    config: Any = torch._dynamo.config
    if getattr(config, "trace_autograd_ops", None) is None:
        pytest.skip(f"torch {torch.__version__} does not trace torch.autograd.grad")
    torch._dynamo.reset()
    with config.patch(trace_autograd_ops=True, automatic_dynamic_shapes=False):
        yield Compilations.watched()
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, compilations: Compilations) -> Compilations:
    """Graphs are made as ever, and run by torch's own operators: without a C++ compiler, in a second."""
    real = torch.compile

    def compile_(function: Any, fullgraph: bool, options: Mapping[str, bool]) -> Any:
        assert options == {"fallback_random": True}
        return real(function, fullgraph=fullgraph, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", compile_)
    return compilations


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)


class Normalized(nn.Module):
    """A model with buffers, random numbers, and parameters whose gradients are the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.shift, self.other_shift = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

    def forward(self, rows: Tensor) -> Tensor:
        """Shapes: (samples, 4) to (samples, 2)."""
        return self.layers(rows) + (self.shift + self.other_shift)  # type: ignore[no-any-return]


FEATURES: dict[str, Any] = {
    "micro_batch_size": 8, "clip_grad_norm": 0.1, "clip_grad_value": 0.05, "ema_decay": 0.9, "compare_replicas": 3,
    "factory": Normalized,
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "graphs"),
    [
        (FEATURES, 2),
        ({**FEATURES, "make": adamw, "freeze_until": FreezeUntil(step=4, match=("layers.3.*",))}, 2),
        ({"precision": "bf16", "make": adamw}, 2),
        ({"nonfinite": "skip", "make": partial(torch.optim.SGD, lr=0.05)}, 2),
        ({"make": partial(torch.optim.RMSprop, lr=0.01)}, 1),
    ],
)
def test_the_numbers_are_those_of_the_steps_as_written(
    traced: Compilations, fit: Callable[..., Once], keys: dict[str, Any], graphs: int
) -> None:
    found = fit(Sides(), compile_step=True, **keys)
    again = int("freeze_until" in keys)  # the update of more parameters
    assert traced.summary().startswith(f"torch.compile: {graphs} compiled, {again} compiled again")
    expected = fit(Sides(), **keys)
    assert near(found.weights, expected.weights, 1e-2 if "precision" in keys else 2e-6)
    own, theirs = (dict(one.loop.states["optimizers"].state()["optimizer"]) for one in (found, expected))
    assert own["groups"] == theirs["groups"]  # with rates that are numbers
    assert [*own["state"]] == [*theirs["state"]]
    assert all(own["state"][name].keys() == state.keys() for name, state in theirs["state"].items())
    if found.loop.average is not None and expected.loop.average is not None:
        assert near(found.loop.average.tensors("model"), expected.loop.average.tensors("model"), 2e-6)


class Weighted:
    """Several losses, with the progress of the run, counted by tensors and by a number."""

    def __init__(self) -> None:
        self.table = torch.tensor([0.25, 1.0])

    def counts(self, batch: Any) -> dict[str, Tensor]:
        """Return the sum of the weights."""
        return {"class": self.table[batch[2]].sum()}

    def step(self, model: Any, batch: Any, progress: Any) -> Any:
        """Return both losses."""
        _, rows, labels = batch
        scores = model(rows)
        each = nn.functional.cross_entropy(scores, labels, weight=self.table, reduction="sum")
        size = scores.square().sum() * progress.fraction
        count = self.table[labels].sum()
        return {"class": (each, count), "size": (size, len(rows), 0.1)}, {"seen": (torch.tensor(1.0), len(rows))}


class Padded:
    """A loss whose count is a tensor."""

    def step(self, model: Any, batch: Any) -> Any:
        """Return the loss of the points on one side, so to say."""
        _, rows, labels = batch
        each = nn.functional.cross_entropy(model(rows), labels, reduction="none")
        mask = (rows[:, 0] > 0).float()
        return (each * mask).sum(), mask.sum(), {}


@pytest.mark.parametrize("task", [Weighted, Padded])
def test_counts_of_losses_divide_them_as_ever(
    traced: Compilations, fit: Callable[..., Once], task: Callable[[], Any]
) -> None:
    found, expected = (fit(task(), micro_batch_size=8, compile_step=compiles) for compiles in (True, False))
    assert traced.summary() == "torch.compile: 2 compiled, 0 compiled again"
    assert near(found.weights, expected.weights, 2e-6)
    names = [name for name in expected.records[-1] if name.startswith("train/loss")]
    assert found.records[-1].keys() >= set(names)
    assert all(found.records[-1][name] == pytest.approx(expected.records[-1][name], rel=1e-5) for name in names)


def parts(loop: Loop) -> tuple[Any, Any]:
    return loop.run.strategy.eval_model, loop.run.optimizers["optimizer"]


def check_bits(points: Any, folder: Path, **trainer: Any) -> None:
    """Check that a second run, and one that is interrupted and resumed, have the same bits, which are nearly eager's."""
    keys: dict[str, Any] = {"eval_every": 0, "micro_batch_size": 12, "factory": Normalized, **trainer}

    def run(first: int = 0, before: Loop | None = None, last: int | None = None, compiles: bool = True) -> Loop:
        loop, _ = loop_alone(points, folder, Sides(), compile_step=compiles, **keys)
        for part, source in zip(parts(loop), parts(before), strict=True) if before is not None else ():
            part.load_state_dict(source.state_dict())
        loop.progress.step = first
        if last is None:
            loop.fit()
        for step, batches in enumerate(loop.run.train.steps(0, last)) if last is not None else ():
            loop._rates.set(step)
            loop._step.take(step, batches, with_norm=False)
        return loop

    loops = [run(), run(), run(3, before=run(last=3)), run(compiles=False)]
    found, *same, plain = [loop.run.strategy.eval_model.state_dict() for loop in loops]
    assert all(torch.equal(one[name], found[name]) for one in same for name in found)
    assert near(found, plain, 1e-5)  # with its random numbers, too


def test_a_second_run_and_a_resumed_one_have_the_same_bits(traced: Compilations, points: Any, tmp_path: Path) -> None:
    check_bits(points, tmp_path)
    check_bits(points, tmp_path, make=adamw)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own, of its Inductor
@pytest.mark.parametrize("make", [sgd, adamw])
def test_so_do_those_that_inductor_compiles(compilations: Compilations, points: Any, tmp_path: Path, make: Any) -> None:
    with torch._inductor.config.patch(compile_threads=1):  # no threads are left
        check_bits(points, tmp_path, make=make)


class Printing:
    """A task of which torch makes no graph."""

    def step(self, model: Any, batch: Any) -> Any:
        """Print the loss."""
        loss = model(batch[1]).square().sum()
        print(loss.item())
        return loss, len(batch[1]), {}


class Counting:
    """A task that is compiled again in each step."""

    calls = 0

    def step(self, model: Any, batch: Any) -> Any:
        """Count."""
        self.calls += 1
        return model(batch[1]).square().sum() * self.calls, len(batch[1]), {}


class ByItself(Padded):
    """A task with steps of its own."""

    def train_step(self, update: Any, batches: Any) -> Any:
        """Do as ever."""
        sums = update.backward(batches)
        update.apply()
        return sums


class Contrast:
    """A loss over the global batch."""

    def embed(self, model: Any, batch: Any) -> Any:
        """Return scores."""
        return model(batch[1])

    def loss(self, model: Any, embeddings: Any) -> Any:
        """Return their sum."""
        return embeddings.sum(), len(embeddings), {}


class Uncounted(Weighted):
    counts: Any = None

    def __getattribute__(self, name: str) -> Any:
        if name == "counts":
            raise AttributeError(name)
        return super().__getattribute__(name)


class Unused(nn.Linear):
    """A layer with a parameter that no loss depends on."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.more = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("task", "factory", "expected"),
    [
        (Printing, None, "trainer.compile_step=true: torch makes one graph"),
        (Counting, None, "trainer.compile_step=true: too often"),
        (ByItself, None, "trainer.compile_step=true: decides by itself"),
        (Contrast, None, "trainer.compile_step=true: global batch"),
        (Padded, lambda: nn.Sequential(nn.Linear(4, 2), nn.Embedding(3, 2, sparse=True)), "trainer.compile_step=true: model.1"),
        (Padded, lambda: nn.Linear(4, 2, dtype=torch.complex64), "trainer.compile_step=true: complex"),
    ],
)  # fmt: skip
def test_what_is_no_graph_is_refused_with_the_reason(
    traced: Compilations, fit: Callable[..., Once], task: Callable[[], Any], factory: Any, expected: str
) -> None:
    with refused(expected) as caught:
        fit(task(), num_steps=12, factory=factory, compile_step=True)
    assert "trainer.compile_step=false" in caught.value.suggestion
    if task is Printing:
        assert __file__ in str(caught.value.place)
    if task is ByItself:
        assert caught.value.place == located(ByItself.train_step)


def test_what_steps_refuse_is_refused_in_graphs(traced: Compilations, fit: Callable[..., Once]) -> None:
    with refused("strategy.find_unused_parameters=true", DdpexpError):
        fit(Padded(), factory=Unused, compile_step=True)
    with refused("a method counts", DdpexpError):
        fit(Uncounted(), compile_step=True)


def test_a_torch_that_cannot_trace_gradients_is_named(
    fit: Callable[..., Once], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._dynamo, "config", SimpleNamespace())
    assert not compiler.prepare_steps()
    with refused(f"trainer.compile_step=true: {torch.__version__}"):
        fit(Padded(), compile_step=True)


@pytest.mark.parametrize(
    ("make", "cycles", "word"),
    [
        (sgd, False, None),
        (partial(torch.optim.Adam, lr=0.1), False, None),
        (partial(torch.optim.NAdam, lr=0.1), False, "none of SGD"),
        (partial(torch.optim.SGD, lr=0.1, fused=True), False, "fused"),
        (sgd, True, "momentum"),
    ],
)
def test_updates_that_are_not_compiled_have_a_reason(make: Any, cycles: bool, word: str | None) -> None:
    optimizer = make([nn.Parameter(torch.ones(2))])
    reason = compiled_update.obstacle(optimizer, cycles)
    assert (reason is None) if word is None else reason is not None and word in reason
    optimizer.register_step_pre_hook(lambda *_: None)
    assert compiled_update.obstacle(optimizer, cycles) is not None


def test_an_update_that_is_not_compiled_is_said_once(
    traced: Compilations, fit: Callable[..., Once], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ddpexp"):
        fit(Sides(), compile_step=True, make=partial(torch.optim.NAdam, lr=0.1))
    assert [one.message for one in caplog.records if "NAdam" in one.message] == [
        "trainer.compile_step=true: the update is not compiled, since the optimizer (NAdam) is none of SGD, Adam and "
        "AdamW of torch"
    ]
