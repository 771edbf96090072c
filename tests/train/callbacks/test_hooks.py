"""Callbacks in a run: when they are called, what they may request, and what an error of theirs costs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.train.callbacks.base import Callback, Requests, RunView
from ddpexp.train.callbacks.early_stopping import EarlyStopping
from ddpexp.train.callbacks.hooks import Callbacks
from ddpexp.train.callbacks.lr_monitor import LRMonitor
from ddpexp.train.loop import Loop
from ddpexp.train.recipe_checks import check_callback
from tests.fitting import ALONE, Kept, loop_alone
from tests.points import Recipe
from tests.records import timeless
from tests.refusals import located, refused


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.conftest import Ddpexp

    return Recipe(Ddpexp(tmp_path_factory.mktemp("callbacks"), {})).module()


@dataclass
class Notes(Callback):
    """Notes its calls."""

    calls: list[tuple[str, int]] = field(default_factory=list)

    def on_start(self, run: RunView) -> None:
        self.calls.append(("start", run.step))

    def on_gradients(self, run: RunView) -> None:
        self.calls.append(("gradients", run.step))
        assert [name for name, _ in run.gradients()] == sorted(
            f"model.{name}" for name, _ in run.models["model"].named_parameters()
        )

    def on_step(self, run: RunView) -> None:
        self.calls.append(("step", run.step))

    def on_evaluated(self, run: RunView, metrics: Mapping[str, float]) -> None:
        self.calls.append(("evaluated", run.step))
        assert set(metrics) == set(run.metrics) == {"eval/loss", "eval/accuracy"}

    def on_end(self, run: RunView) -> None:
        self.calls.append(("end", run.step))


def fitting(points: Any, folder: Path, *members: Callback, steps: int = 8, **keys: Any) -> tuple[Loop, Kept, Path]:
    named = {f"c{number}": member for number, member in enumerate(members)}
    loop, path = loop_alone(
        points, folder, points.Sides(), steps, callbacks=Callbacks(named, ALONE), checkpoint_every=0, **keys
    )
    loop.checkpointer = saves = Kept()
    return loop, saves, path


def test_methods_are_called_in_order_and_only_those_that_are_overridden(points: Any, tmp_path: Path) -> None:
    notes = Notes()
    loop, _, _ = fitting(points, tmp_path, notes, Callback(), steps=3, eval_every=2)
    assert [name for name, _ in loop.callbacks.on_step] == ["c0"]
    loop.fit()
    assert notes.calls == [
        ("start", 0),
        ("gradients", 0), ("step", 1),
        ("gradients", 1), ("step", 2), ("evaluated", 2),
        ("gradients", 2), ("step", 3), ("evaluated", 3),
        ("end", 3),
    ]  # fmt: skip


def test_a_run_is_the_same_with_callbacks(points: Any, tmp_path: Path) -> None:
    loop, _, path = fitting(points, tmp_path, Notes())
    loop.fit()
    alone, path_alone = loop_alone(points, tmp_path, points.Sides(), 8)
    alone.fit()
    weights, expected = (one.run.strategy.modules["model"].state_dict() for one in (loop, alone))
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    one, other = ([timeless(json.loads(line)) for line in file.read_text().splitlines()] for file in (path, path_alone))
    assert one == other


@dataclass
class Asks(Callback):
    """Requests something in a hook at a step."""

    hook: str
    step: int
    what: str

    def _ask(self, run: RunView) -> None:
        if run.step == self.step:
            run.save() if self.what == "save" else run.stop("enough")

    def on_step(self, run: RunView) -> None:
        if self.hook == "on_step":
            self._ask(run)

    def on_evaluated(self, run: RunView, metrics: Mapping[str, float]) -> None:
        if self.hook == "on_evaluated":
            self._ask(run)


@pytest.mark.parametrize(
    ("hook", "step", "what", "saved", "stopped"),
    [
        ("on_evaluated", 3, "save", [3, 10], None),
        ("on_evaluated", 3, "stop", [3], "callbacks.c0: enough"),
        ("on_step", 2, "save", [4, 10], None),  # at the next record
        ("on_step", 5, "stop", [8], "callbacks.c0: enough"),
        ("on_evaluated", 10, "stop", [10], None),  # the last step is not early
    ],
)
def test_requests_take_effect_where_the_ranks_communicate(
    points: Any, tmp_path: Path, hook: str, step: int, what: str, saved: list[int], stopped: str | None
) -> None:
    every = 3 if hook == "on_evaluated" else 0
    loop, saves, _ = fitting(points, tmp_path, Asks(hook, step, what), steps=10, eval_every=every)
    outcome = loop.fit()
    assert (saves.steps, outcome.stopped, outcome.interrupted) == (saved, stopped, False)
    assert outcome.step == saved[-1]


class Fails(Callback):
    """Raises in its second step, and would again."""

    def on_step(self, run: RunView) -> None:
        if run.step >= 2:
            raise KeyError("absent")


class Blames(Callback):
    """Raises in an evaluation."""

    def on_evaluated(self, run: RunView, metrics: Mapping[str, float]) -> None:
        raise DdpexpError("nothing to see.")


@pytest.mark.parametrize(
    ("callback", "message", "every", "step"),
    [
        (Fails(), "KeyError: 'absent'. Step 3 is saved", 3, 3),
        (Fails(), "KeyError: 'absent'. Step 4 is saved", 0, 4),  # at the next record
        (Blames(), "nothing to see. Step 3 is saved", 3, 3),
    ],
)
def test_an_error_ends_the_run_where_it_is_saved_and_names_the_place(
    points: Any, tmp_path: Path, callback: Callback, message: str, every: int, step: int
) -> None:
    loop, saves, _ = fitting(points, tmp_path, callback, eval_every=every)
    with pytest.raises(DdpexpError) as caught:
        loop.fit()
    hook = "on_step" if isinstance(callback, Fails) else "on_evaluated"
    assert str(caught.value).startswith(f"callbacks.c0 failed in {hook} ({__file__}:")
    assert f"): {message}: correct the callback, or leave it out." in str(caught.value)
    assert saves.steps == [step]


def test_an_error_at_the_start_ends_it_at_once(points: Any, tmp_path: Path) -> None:
    class Late(Callback):
        def on_start(self, run: RunView) -> None:
            raise OSError("no such file")

    loop, saves, _ = fitting(points, tmp_path, Late())
    with refused("callbacks.c0 failed in on_start: OSError: no such file", DdpexpError):
        loop.fit()
    assert saves.steps == []


def test_what_is_no_callback_or_is_never_called_is_refused() -> None:
    class Misspelt(Callback):
        def on_evaluate(self, run: RunView) -> None: ...

    class Short(Callback):
        def on_step(self) -> None: ...  # type: ignore[override]

    class Lonely(Callback):
        rank_zero_only, communicates = True, True

    class Forgets(Callback):
        def state_dict(self) -> Mapping[str, Any]:
            return {"seen": 1}

    class Loads(Callback):
        def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    target = "callbacks.mine._target_=mine.Mine"
    for made, expected in [
        (object(), f"{target}: object"),
        (Misspelt(), f"{target}: Misspelt.on_evaluate did you mean on_evaluated?"),
        (Short(), f"{located(Short.on_step)}: def on_step(self, run)."),
        (Lonely(), f"{target}: rank_zero_only and communicates"),
        (Forgets(), f"{target}: def load_state_dict(self, state), or leave state_dict out."),
        (Loads(), f"{target}: def state_dict(self), or leave load_state_dict out."),
    ]:
        with refused(expected):
            check_callback(made, target)


def test_pending_requests_and_states_are_restored_and_an_ended_run_stays_ended() -> None:
    first = Callbacks({"early": EarlyStopping(), "notes": Notes()}, identity="a")
    stopping = first.members["early"]
    assert isinstance(stopping, EarlyStopping)
    stopping.best, stopping.best_step, stopping.waited = 0.5, 7, 2
    first.requests.stop, first.stopped = "later", "why"
    saved = first.state()
    again = Callbacks({"early": EarlyStopping(), "other": LRMonitor()}, identity="a")
    assert again.restore(saved) == []
    assert again.members["early"] == stopping
    assert (again.requests, again.stopped) == (Requests(stop="later"), "why")
    changed = Callbacks({"late": EarlyStopping(patience=9)}, identity="b")
    assert changed.restore(saved) == ["late"]
    assert changed.stopped is None
    assert Callbacks().state() == {}


class Unstorable(Callback):
    """Its state is something that only pickle could store."""

    def state_dict(self) -> Mapping[str, Any]:
        return {"seen": {1, 2}}


def test_a_state_that_no_checkpoint_can_hold_is_refused_at_the_start(points: Any, tmp_path: Path) -> None:
    loop, saves, _ = fitting(points, tmp_path, Unstorable())
    with pytest.raises(RefusedError) as caught:
        loop.fit()
    assert str(caught.value).startswith("callbacks.c0: The state that Unstorable.state_dict (")
    assert "cannot be saved: state/seen is a builtins.set, which a checkpoint cannot hold" in str(caught.value)
    assert saves.steps == []
