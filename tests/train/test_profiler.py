"""Profiles of some steps: their files and phases, what begins and ends them, and that nothing else notices."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpexp.config.check_trainer import check_trainer
from ddpexp.distributed.times import Times
from ddpexp.launch.workers.control import Control
from ddpexp.launch.workers.page import What
from ddpexp.run.directory import RunDir
from ddpexp.settings.profile import StepWindow, check_profiled
from ddpexp.train import profiler
from ddpexp.train.loop import Loop
from ddpexp.train.memory_snapshot import StepSnapshot
from tests.fitting import Kept, Once, asked, loop_alone, restore
from tests.refusals import refused
from tests.train.test_loop import points, recipe

__all__ = ["points", "recipe"]  # its fixtures

STEPS = 8


@dataclass
class Asks(Control):
    """A command that asks for something after some steps; rank zero's messages go here."""

    def __init__(self, **asks: tuple[What, int]) -> None:
        super().__init__(None)
        self.asks = {int(name.removeprefix("after_")): what for name, what in asks.items()}
        self.sent: list[dict[str, Any]] = []

    def poll(self, done: int, save: bool = False, end: bool = False) -> What | None:
        what, self.profile_steps = self.asks.get(done, (None, 0))
        return what

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append({"kind": kind, **fields})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def loop_of(points: Any, folder: Path, task: Any = None, control: Control | None = None, **keys: Any) -> Loop:
    folder.mkdir(exist_ok=True)
    task = task or points.Sides()
    loop, _ = loop_alone(points, folder, task, STEPS, control=control, directory=RunDir(folder), **keys)
    loop.checkpointer = Kept()
    return loop


def trained(*words: Any, **keys: Any) -> dict[str, Any]:
    loop = loop_of(*words, **keys)
    loop.fit()
    return Once(loop, []).weights


def ranges(folder: Path, step: int) -> Counter[str]:
    """Return the number of events of each phase and step in a trace."""
    with gzip.open(folder / f"profiles/step{step}/rank0.trace.json.gz") as file:
        trace = json.load(file)
    assert trace["distributedInfo"] == {"rank": 0, "world_size": 1}
    names = Counter(event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation")
    return Counter({name: count for name, count in names.items() if "." not in name})


def steps_in(folder: Path, begin: int) -> list[int]:
    return [int(name.partition("#")[2]) for name in ranges(folder, begin) if name.startswith("ProfilerStep#")]


def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    "keys",
    [
        {"micro_batch_size": 6, "ema_decay": 0.9, "clip_grad_norm": 0.5},
        {"micro_batch_size": 8, "reduction": "exact"},
        {"nonfinite": "skip"},
    ],
    ids=["accumulated", "exact", "skips"],
)
def test_a_profile_has_the_steps_and_their_phases_and_changes_no_bit(
    points: Any, folder: Path, tmp_path: Path, keys: dict[str, Any]
) -> None:
    keys = {"eval_every": 4, "checkpoint_every": 3, "log_every": 2, **keys}
    (tmp_path / "plain").mkdir()
    plain = trained(points, tmp_path / "plain", **keys)
    assert equal(trained(points, folder, profile="2:5", **keys), plain)
    assert sorted(path.name for path in folder.glob("profiles/*/*")) == ["rank0.operators.txt", "rank0.trace.json.gz"]
    assert steps_in(folder, 2) == [3, 4, 5]
    phases = ranges(folder, 2)
    assert {name: phases[name] for name in ("data", "backward", "record", "evaluation", "checkpoint")} == {
        "data": 3, "backward": 3 * 24 // keys.get("micro_batch_size", 24), "record": 1, "evaluation": 1,
        "checkpoint": 1,
    }  # fmt: skip
    table = (folder / "profiles/step2/rank0.operators.txt").read_text()
    assert "aten::addmm" in table
    assert "forward" in table


def test_tasks_that_step_by_themselves_are_profiled(points: Any, folder: Path) -> None:
    trained(points, folder, points.Pair(), factory=points.pair, profile="0:2", evals={})
    assert steps_in(folder, 0) == [1, 2]
    assert ranges(folder, 0)["backward"] == 4


def test_a_pause_counts_in_no_clock(points: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    class Works(points.Sides):  # type: ignore[misc]
        def step(self, model: Any, batch: Any) -> Any:
            now[0] += 2.0
            return super().step(model, batch)

    def slow(*_: Any) -> str:
        now[0] += 64.0
        return ""

    monkeypatch.setattr(profiler, "_tables", slow)
    loop = loop_of(points, folder, Works(), profile="3:5", log_every=8, eval_every=0)
    monkeypatch.setattr(loop._times, "_read", lambda: now[0])
    outcome = loop.fit()
    assert now[0] > 1000 + 64 + 2 * STEPS  # the check of the first step takes steps of its own
    assert outcome.train_seconds == 2 * STEPS
    assert outcome.elapsed_seconds < 64
    [record] = [json.loads(line) for line in next(folder.glob("metrics*")).read_text().splitlines()]
    assert record["train/samples_per_second"] == 24 / 2
    times = {name: value for name, value in record.items() if name.startswith("times/") and value}
    assert times == {"times/forward": pytest.approx(2.0)}


def test_requests_profile_from_the_step_that_all_agree_on(points: Any, folder: Path) -> None:
    control = Asks(after_1=("profile", 2), after_4=("save", 100))
    loop = loop_of(points, folder, control=control, checkpoint_every=0)
    loop.fit()
    assert control.sent == [
        {"kind": "profiled", "begin": 1, "end": 3, "missing": 0},
        {"kind": "profiled", "begin": 4, "end": STEPS, "missing": 0},  # as far as the run goes
    ]
    assert (steps_in(folder, 1), steps_in(folder, 4)) == ([2, 3], [5, 6, 7, 8])
    assert isinstance(loop.checkpointer, Kept)
    assert 4 in loop.checkpointer.steps


def test_a_profile_in_progress_goes_on_to_the_last_step_that_is_asked_for(points: Any, folder: Path) -> None:
    control = Asks(after_1=("profile", 2), after_3=("profile", 1))
    trained(points, folder, control=control, profile="2:4")
    assert [(sent["begin"], sent["end"]) for sent in control.sent] == [(1, 4)]


def test_a_run_that_stops_or_fails_within_the_steps_writes_none_and_a_resume_does(points: Any, folder: Path) -> None:
    class Fails(points.Sides):  # type: ignore[misc]
        calls = 0

        def step(self, model: Any, batch: Any) -> Any:
            self.calls += 1
            if self.calls == 4:
                raise ValueError("no fourth step")
            return super().step(model, batch)

    with pytest.raises(ValueError, match="no fourth step"):
        trained(points, folder, Fails(), profile="2:6")
    loop = loop_of(points, folder, control=Asks(after_4=("stop", 0)), profile="2:6")
    assert loop.fit().interrupted
    assert not list(folder.glob("profiles/*/rank*"))
    assert isinstance(loop.checkpointer, Kept)
    resumed = loop_of(points, folder, profile="2:6")
    restore(resumed, loop.checkpointer.saved[-1])
    resumed.fit()
    assert steps_in(folder, 4) == [5, 6]


def test_an_early_end_writes_what_there_is(points: Any, folder: Path) -> None:
    trained(points, folder, control=Asks(after_4=("end", 0)), profile="2:6", eval_every=0, max_seconds=1e9)
    assert steps_in(folder, 2) == [3, 4]


def test_what_cannot_be_written_ends_no_run(points: Any, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir()
    (folder / "profiles").write_text("in the way")
    control = Asks()
    trained(points, folder, profile="2:4", control=control)
    assert "the profile of rank 0 cannot be written" in caplog.text
    assert control.sent == [{"kind": "profiled", "begin": 2, "end": 4, "missing": 1}]


def test_an_observer_hears_of_phases_before_times_are_taken_and_within_none() -> None:
    class Notes:
        def __init__(self) -> None:
            self.heard: list[int | str] = []

        def begin_phase(self, phase: int) -> None:
            self.heard.append(phase)

        def begin_collective(self) -> None:
            self.heard.append("(")

        def end_collective(self) -> None:
            self.heard.append(")")

    times, notes = Times(), Notes()
    times.observe(notes)
    times.begin(1)
    times.start(torch.device("cpu"))
    with times.collective:
        pass
    times.end_step()
    with times.apart(7):
        times.begin(2)
    times.observe(None)
    times.begin(0)
    assert notes.heard == [1, "(", ")", 7, 5]


def snapshots(step: int | None, begin: int = 0) -> Sequence[int]:
    """Return the steps after which a snapshot begins and ends."""
    found, snapshot = [], StepSnapshot(step=step)
    while (following := snapshot.next_after(begin)) is not None:
        found.append(begin := following)
    return found


def test_the_memory_of_a_step_is_recorded_in_that_step_alone() -> None:
    assert snapshots(5) == [4, 5]
    assert snapshots(5, begin=4) == [5]
    assert snapshots(5, begin=5) == snapshots(None) == []


def test_steps_that_a_run_does_not_have_are_refused() -> None:
    assert [str(StepWindow.parse(text)) for text in ("100:110", "0:1")] == ["steps 101 to 110", "step 1"]
    for profile, about in {
        "110:100": "trainer.profile=110:100: trainer.profile=100:110",
        "5:5": "trainer.profile=5:5: trainer.profile=5:15",
        "0:1001": "trainer.profile=0:1001: trainer.profile=0:10",
        "95:105": "trainer.profile=95:105: trainer.profile=90:100",
    }.items():
        with refused(about):
            check_trainer(asked(profile=profile, max_steps=100).trainer)
    check_profiled(asked(profile="90:100", memory_snapshot=100).trainer, 100)
    with refused("trainer.memory_snapshot=101"):
        check_profiled(asked(memory_snapshot=101).trainer, 100)
