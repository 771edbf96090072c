"""Rows: what directories say, whoever wrote them."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ddpexp.checkpoint.weights import Best
from ddpexp.config.keys import MISSING
from ddpexp.run.differences import Value
from ddpexp.run.directory import RunDir
from ddpexp.sweep.comparison import varying
from ddpexp.sweep.files import curve
from ddpexp.sweep.record import Goal
from ddpexp.sweep.rows import Row, RowReader, directories, goal_of, rows_of, with_values
from tests.sweep.made import POINTS, Made, hold, hold_dead, run


def one(path: Path, objective: str | None = None) -> Row:
    [row] = rows_of(path, objective)
    return row


def test_the_rows_of_real_runs_are_what_the_runs_have_written(trained: Path) -> None:
    first, second, bad = rows_of(trained)
    result = json.loads((first.path / "result.json").read_text())
    assert first.metrics.items() >= result["metrics"].items()
    assert {"train/loss", "train/lr", "eval/loss", "eval/accuracy"} <= set(first.metrics)
    assert first.objective == result["metrics"]["eval/loss"]
    assert (first.status, first.step, first.seconds) == (
        "done",
        result["step"],
        1.0,
    )  # the last as the sweep has recorded it
    assert first.overrides["optimizer.lr"] == "0.1"
    assert second.overrides["model.hidden"] == "8"
    assert first.overrides["recipe"] == "points"  # what its own words do not have
    assert "run.dir" not in first.overrides
    assert first.started is not None
    assert first.ended is not None
    assert first.started <= first.ended
    assert (bad.number, bad.status, bad.step, bad.objective) == (2, "failed", 0, None)  # though its last event is lost
    assert bad.message == r"rank 0: ValueError: no\x1b[31m luck"
    assert goal_of(trained) == Goal("eval/loss", "min")


def test_a_run_directory_is_one_row_and_any_metric_can_be_named(trained: Path) -> None:
    first = rows_of(trained)[0]
    row = one(first.path, "eval/accuracy")
    assert row.objective == json.loads((first.path / "result.json").read_text())["metrics"]["eval/accuracy"]
    assert (row.status, row.name, row.overrides) == ("done", first.name, first.overrides)
    assert row.started is not None
    assert row.ended is not None
    assert row.seconds == row.ended - row.started
    assert (
        row.seconds > json.loads((first.path / "result.json").read_text())["seconds"]
    )  # which are those of its steps alone
    assert one(first.path).objective is None  # nobody has named one


def test_the_curve_of_a_real_run_is_that_of_its_records(trained: Path) -> None:
    first = rows_of(trained)[0]
    lines = [json.loads(line) for line in (first.path / "metrics.jsonl").read_text().splitlines()]
    points = curve(RunDir(first.path).metrics, "eval/loss")
    assert points == [(line["step"], line["eval/loss"]) for line in lines if "eval/loss" in line]
    assert len(points) == 2
    assert curve(RunDir(first.path).metrics, "eval/nothing") == []


def test_a_job_that_has_not_begun_waits(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    made.job("optimizer.lr=0.1", events=())
    row = one(made.path)
    assert (row.status, row.objective, row.overrides) == ("waiting", None, {"optimizer.lr": "0.1"})


def test_a_job_runs_while_its_command_lives_and_is_killed_when_it_is_gone(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    path = made.job("optimizer.lr=0.1", status=None, events=("started",))
    hold(path)
    row = one(made.path)
    assert (row.status, row.step, row.objective) == ("running", 30, 0.5)
    assert row.seconds is not None
    assert row.ended is None
    hold_dead(path)
    assert one(made.path).status == "killed"


@pytest.mark.parametrize("status", ["done", "failed"])
def test_the_time_of_a_job_does_not_shrink_when_it_ends(tmp_path: Path, status: str) -> None:
    """Of a job of a sweep, and of the same directory by itself."""
    made = Made(tmp_path / "sweep")
    path = made.job("optimizer.lr=0.1", status=None, events=("started",))
    begin = time.time() - 30
    (path / "manifest.json").write_text(json.dumps({"started": moment(begin)}))
    hold(path)
    reader = RowReader(made.path)
    before = [*reader.rows(), one(path)]
    (path / "result.json").write_text(
        json.dumps({"status": status, "step": 30, "seconds": 0.5, "ended_at": time.time()})
    )
    leaving = [*reader.rows(), one(path)]
    hold_dead(path)
    written = [*reader.rows(), one(path)]
    made.add("ended", job=0, status=status, exit_code=0, seconds=40.0, objective=0.5, message=None)
    recorded = reader.rows()
    for earlier, later in itertools.pairwise([before, leaving, written, recorded]):
        for one_before, one_after in zip(earlier, later, strict=False):
            assert one_before.seconds is not None
            assert one_after.seconds is not None
            assert one_before.seconds <= one_after.seconds + 1e-3  # a moment is kept in microseconds
    assert (recorded[0].status, recorded[0].seconds) == (status, 40.0)
    assert before[1].seconds is not None
    assert before[1].seconds >= 30


def test_the_time_is_that_of_the_newest_start(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    path = made.job("optimizer.lr=0.1", seconds=70.0)
    assert one(made.path).seconds == 70.0
    begin = time.time() + 100  # after the sweep, by a command of its own
    (path / "manifest.json").write_text(json.dumps({"started": moment(begin)}))
    change = json.loads((path / "result.json").read_text())
    (path / "result.json").write_text(json.dumps({**change, "ended_at": begin + 7}))
    assert one(made.path).seconds == pytest.approx(7, abs=1e-3)


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%dT%H:%M:%S.%f%z")


def test_a_job_whose_command_has_just_been_started_runs_while_the_sweep_lives(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    path = made.job(
        "optimizer.lr=0.1", status="interrupted", events=("started",)
    )  # its second start: this is of the first
    hold_dead(path)
    hold(made.path)
    assert one(made.path).status == "running"
    hold_dead(made.path)
    assert one(made.path).status == "interrupted"


def test_the_result_is_the_truth_where_the_record_speaks_too(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    made.job("optimizer.lr=0.1", status="done", events=("started",))  # the sweep was killed before it wrote the end
    made.job("optimizer.lr=0.2", status="done", events=("started",))
    made.add("ended", job=1, status="failed", exit_code=1, seconds=1.0, objective=7.0, message="no word of it")
    assert [(row.status, row.objective, row.message) for row in rows_of(made.path)] == [("done", 0.5, None)] * 2


def test_a_job_that_never_got_a_directory_has_the_recorded_status(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    made.job("optimizer.lr=0.1", events=())
    made.add("started", job=0, attempt=1, slots=[0], gpus=[])
    made.add(
        "ended", job=0, status="failed", exit_code=2, seconds=0.4, objective=None, message="optimizer.lr: \x1b[2J no"
    )
    row = one(made.path)
    assert (row.status, row.message, row.seconds) == ("failed", r"optimizer.lr: \x1b[2J no", 0.4)


def test_a_pruned_job_is_stopped_and_not_only_interrupted(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    made.job(status="interrupted", events=("started",))
    made.add(
        "ended",
        job=0,
        status="stopped",
        exit_code=143,
        seconds=3.0,
        objective=0.5,
        message="worse than half of the others",
    )
    assert (one(made.path).status, one(made.path).message) == ("stopped", "worse than half of the others")


def test_a_run_that_ended_early_is_done_and_says_why(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    made.job(stopped="trainer.max_seconds=5 has passed")
    assert (one(made.path).status, one(made.path).message) == ("done", "trainer.max_seconds=5 has passed")


def test_a_submitted_job_is_in_the_queue_or_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake squeue: the real one needs jobs of another user's rights and minutes."""
    made = Made(tmp_path / "sweep")
    for number, job_id in enumerate(("12_0", "12_1", "15")):
        made.job(f"optimizer.lr=0.{number}", events=())
        made.add("submitted", job=number, job_id=job_id)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [row.status for row in rows_of(made.path)] == ["submitted"] * 3  # no Slurm here, so nobody knows better
    fake = tmp_path / "squeue"
    fake.write_text('#!/bin/sh\necho "$@" > asked\necho "12_0 13 RUNNING\n12_1 14 PENDING"\n')
    fake.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    rows = rows_of(made.path)
    assert [(row.status, row.job and row.job.id) for row in rows] == [
        ("submitted", "12_0"),
        ("submitted", "12_1"),
        ("killed", "15"),
    ]
    assert rows[2].message == "Slurm job 15 is no longer in the queue, and has recorded no result"
    assert "--jobs=12,15\n" in (tmp_path / "asked").read_text()  # once for all of them


def test_a_command_on_another_host_may_live(tmp_path: Path) -> None:
    path = run(tmp_path / "run", status=None)
    hold(path, host="elsewhere", pid=77)
    row = one(path)
    assert row.status == "running"
    assert row.message == "whether process 77 on elsewhere is still running cannot be checked from this host"


def test_a_value_that_is_not_finite_is_nan_and_never_the_best(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    path = made.job("optimizer.lr=9")
    (path / "result.json").write_text('{"status": "done", "step": 30, "metrics": {"eval/loss": null}}')
    row = one(made.path)
    assert row.objective is not None
    assert math.isnan(row.objective)

    def best(goal: Goal, *values: float | None) -> float | None:
        return goal.best(values, lambda value: value)

    assert best(Goal("eval/loss", "min"), math.nan, 0.5, None, 0.2, math.inf) == 0.2
    assert best(Goal("eval/loss", "max"), math.nan, 0.5, None, 0.2, math.inf) == 0.5
    assert best(Goal("eval/loss"), math.nan, None) is None
    assert best(Goal(), 1.0) is None


def test_the_newest_value_is_found_however_long_the_records_are(tmp_path: Path) -> None:
    path = run(tmp_path / "run", status=None, points=())
    line = json.dumps({"step": 7, "epoch": 1.0, "time": 0.0, "train/loss": 0.25, "train/note": 1.0}) + "\n"
    evaluated = json.dumps({"step": 3, "epoch": 1.0, "time": 0.0, "eval/loss": 0.75}) + "\n"
    (path / "metrics.jsonl").write_text(evaluated + line * 5000 + '{"step": 8, "train/lo')
    row = one(path, "eval/loss")
    assert (row.objective, row.step, row.metrics["train/loss"]) == (0.75, 7, 0.25)


def test_secrets_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "canary-5f3c0b9d")
    made = Made(tmp_path / "sweep")
    path = made.job("optimizer.lr=0.1", status="failed", name="canary-5f3c0b9d/loss")
    (path / "overrides.yaml").write_text("[data.token=canary-5f3c0b9d]")
    (path / "error.json").write_text('{"rank": 1, "kind": "ValueError", "step": 7, "message": "no canary-5f3c0b9d"}')
    row = one(made.path, "canary-5f3c0b9d/loss")
    assert row.overrides["data.token"] == "${MY_TOKEN}"
    assert row.message == "rank 1 after step 7: ValueError: no ${MY_TOKEN}"
    assert "canary" not in str((row.overrides, row.metrics, row.message))


def test_rows_are_read_again_only_where_something_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(tmp_path / "sweep")
    first, second = made.job("optimizer.lr=0.1"), made.job("optimizer.lr=0.2")
    reader, read = RowReader(made.path), []
    whole = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, *overrides: read.append(self) or whole(self, *overrides))  # type: ignore[func-returns-value]
    assert [row.objective for row in reader.rows()] == [0.5, 0.5]
    assert read
    read.clear()
    assert [row.objective for row in reader.rows()] == [0.5, 0.5]
    assert not read
    (second / "result.json").write_text('{"status": "done", "step": 40, "metrics": {"eval/loss": 0.25}}')
    assert [row.objective for row in reader.rows()] == [0.5, 0.25]
    assert read
    assert not any(path.is_relative_to(first) for path in read)


HOSTILE = {
    "no json": "{",
    "no object": "[1, 2]",
    "deep": "[" * 100_000,
    "other types": '{"status": ["done"], "step": "x", "metrics": [1], "seconds": {}, "job_id": 7}',
    "strange numbers": '{"status": "done", "step": true, "metrics": {"eval/loss": 1'
    + "0" * 400
    + ', "a": "b"}, "seconds": -1e999}',
    "controls": '{"status": "\\u001b[2J"}',
    "binary": "\x00\x7f\ud800",
}


@pytest.mark.parametrize(
    "name", ["result.json", "error.json", "manifest.json", "metrics.jsonl", "overrides.yaml", "sweep.jsonl"]
)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_whatever_stands_in_a_file_there_is_a_row(tmp_path: Path, name: str, text: str) -> None:
    made = Made(tmp_path / "sweep")
    path = made.job("optimizer.lr=0.1", status="failed")
    raw = text.encode("utf-8", "surrogatepass")
    if name == "sweep.jsonl":
        with open(made.path / name, "ab") as file:
            file.write(raw + b"\n")
    else:
        (path / name).write_bytes(raw)
    row = one(made.path)
    assert row.status in ("failed", "broken", "done")
    assert row.name == path.name
    assert (row.status == "broken") == (row.message is not None)
    assert "\x1b" not in (row.message or "")
    goal_of(made.path)
    curve(RunDir(path).metrics, "eval/loss")


@pytest.mark.parametrize(
    "name", ["result.json", "error.json", "manifest.json", "metrics.jsonl", "overrides.yaml", "lock"]
)
@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "zero"])
def test_what_is_no_plain_file_keeps_nobody_waiting(tmp_path: Path, name: str, kind: str) -> None:
    made = Made(tmp_path / "sweep")
    path = made.job("optimizer.lr=0.1", status="failed") / name
    path.unlink(missing_ok=True)
    make: dict[str, Any] = {
        "pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "loop": lambda: path.symlink_to(path),
        "zero": lambda: path.symlink_to("/dev/zero"),
    }  # fmt: skip
    make[kind]()
    row = one(made.path)
    assert row.status in ("failed", "broken")
    assert (row.status == "broken") == (name in ("result.json", "manifest.json", "metrics.jsonl"))
    curve(RunDir(path.parent).metrics, "eval/loss")


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", "", "..", "a\0b", 7, None, "x" * 300])
def test_a_name_that_leads_elsewhere_is_no_job(tmp_path: Path, name: Any) -> None:
    made = Made(tmp_path / "sweep")
    made.job("optimizer.lr=0.1")
    made.add("planned", job=5, name=name, overrides=["a=b"])
    made.add("planned", job="6", name="0006", overrides=7)
    assert [row.number for row in rows_of(made.path)] == [0]


def test_jobs_that_the_record_has_lost_are_found(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    made.job("optimizer.lr=0.1")
    run(made.path / "0007_optimizer.lr=0.7", ["optimizer.lr=0.7"])
    (made.path / "notes").mkdir()
    assert [(row.number, row.overrides["optimizer.lr"], row.status) for row in rows_of(made.path)] == [
        (0, "0.1", "done"), (7, "0.7", "done"),
    ]  # fmt: skip


def test_a_record_that_is_too_large_is_reported(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    os.truncate(made.path / "sweep.jsonl", 1 << 40)
    row = one(made.path)
    assert (row.status, row.message) == ("broken", "sweep.jsonl has 1,099,511,627,776 bytes, more than 67,108,864")
    assert goal_of(made.path) == Goal()


def test_a_folder_that_is_no_run_is_refused_as_such(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    assert (one(tmp_path).status, one(tmp_path).message) == ("broken", "The directory holds no run")
    assert one(tmp_path / "missing").status == "broken"


def test_sweeps_and_runs_are_found_in_folders(tmp_path: Path) -> None:
    first = run(tmp_path / "outputs/mnist/2026")
    made = Made(tmp_path / "outputs/mnist/sweep")
    made.job("optimizer.lr=0.1")
    (tmp_path / "outputs/empty").mkdir()
    (tmp_path / "outputs/loop").symlink_to(tmp_path / "outputs")
    assert list(directories(tmp_path / "outputs")) == [first, made.path]
    assert list(directories(first)) == [first]
    assert list(directories(tmp_path / "outputs/empty")) == []


def test_values_that_were_not_overridden_come_from_the_configuration(tmp_path: Path) -> None:
    rows = [
        *rows_of(run(tmp_path / "a", ["optimizer.lr=0.1"])),
        *rows_of(run(tmp_path / "b", ["optimizer.nesterov=false", "model=x"])),
    ]
    first, second = with_values(rows)
    assert first.values == {
        "optimizer.lr": "0.1", "optimizer.nesterov": "true", "model": "", "model._target_": "",
    }  # fmt: skip
    assert second.values == {
        "optimizer.lr": "0.5", "optimizer.nesterov": "false", "model": "x", "model._target_": "points.x",
    }  # fmt: skip
    assert varying([first, second]) == ["optimizer.lr", "optimizer.nesterov", "model"]
    assert POINTS[-1][1] == 0.5


def test_values_are_compared_as_they_were_resolved(tmp_path: Path) -> None:
    typed = run(tmp_path / "a", ["optimizer.lr=0.5", "optimizer.nesterov=true", "model=x"])
    other = run(tmp_path / "b", ["model=y", "trainer.seed=0"])
    rows = with_values([*rows_of(typed), *rows_of(other)])
    assert varying(rows) == ["model"]
    assert varying(rows, every=True) == ["model", "model._target_"]
    assert [row.plain("optimizer.lr") for row in rows] == [0.5, 0.5]


def test_a_value_that_changed_on_a_resume_is_shown_with_its_steps(trained: Path) -> None:
    [first, *_] = rows_of(trained)
    changed = {"optimizer.lr": (Value(0, 0.1), Value(1200, 0.01), Value(1300, MISSING, is_exact=False))}
    [row] = with_values([replace(first, changed=changed)])
    assert row.values["optimizer.lr"] == "0.1 -> 0.01 at 1,200 -> not set at about 1,300"
    assert varying([row]) == ["optimizer.lr"]


def test_the_best_step_is_that_of_the_result(tmp_path: Path) -> None:
    best = Best(20, "min", "eval/loss", 0.25)
    path = run(tmp_path / "a", ["trainer.keep_best=min:eval/loss"], best=asdict(best))
    assert one(path).best == best
    (path / "result.json").write_text('{"status": "done", "best": {"step": "x", "mode": 7}}')
    assert one(path).best is None
