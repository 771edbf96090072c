"""`ddpexp table` and `ddpexp status`, as commands."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpexp.cli.status import status
from ddpexp.cli.table import table
from tests.conftest import PATIENCE, ROOT, python_path
from tests.refusals import refused
from tests.sweep.made import Made, hold, hold_dead, run
from tests.typed import call


def ddpexp(
    *overrides: str | Path, cwd: Path = ROOT, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddpexp", *map(str, overrides)], cwd=cwd,
        env={**os.environ, "PYTHONPATH": python_path(), "COLUMNS": "80", **(environ or {})},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


def test_the_table_of_a_real_sweep_is_printed_and_written(trained: Path) -> None:
    done = ddpexp("table", trained)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].split() == [
        "optimizer.lr",
        "model.hidden",
        "task._target_",
        "eval/loss",
        "status",
        "step",
        "time",
        "directory",
    ]
    assert " best " in lines[2]
    assert "3 jobs: 2 done, 1 failed. Best (lowest eval/loss): " in done.stdout
    assert r"rank 0: ValueError: no\x1b[31m luck" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("written: sweep.csv, sweep.md, sweep.png in ")
    with open(trained / "sweep.csv") as file:
        assert [line["status"] for line in csv.DictReader(file)] == ["done", "done", "failed"]
    assert (trained / "sweep.md").read_text().startswith("| optimizer.lr | model.hidden |")
    assert (trained / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_another_metric_and_another_folder_can_be_given(trained: Path, tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in trained.iterdir()}
    done = ddpexp("table", trained, "sweep.objective=eval/accuracy", "--out", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    assert "Best (highest eval/accuracy): " in done.stdout  # more of it is better, unless overridden
    assert "%" in done.stdout
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["sweep.csv", "sweep.md", "sweep.png"]
    assert {path.name: path.stat().st_mtime_ns for path in trained.iterdir()} == before
    assert "Best (lowest eval/accuracy): " in ddpexp("table", *sorted(trained.glob("000*")),
        "sweep.objective=eval/accuracy",
                                                     "sweep.mode=min").stdout  # fmt: skip


@pytest.mark.slow
def test_any_runs_make_a_table_with_keys_that_were_not_overridden_too(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs/mnist"
    run(outputs / "a", ["optimizer.lr=0.1"], points=((1, 0.5),))
    run(outputs / "b", ["optimizer.nesterov=false"], points=((1, 0.25),))
    made = Made(outputs / "c", objective=None)
    made.job("optimizer.lr=0.7", points=((1, 0.125),))
    done = ddpexp("table", "outputs", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "best" not in done.stdout.split("to have the best")[0].lower()
    assert "to have the best marked: sweep.objective=eval/loss" in done.stdout
    [line] = [line.split() for line in done.stdout.splitlines() if line.rstrip().endswith("outputs/mnist/b")]
    assert line[:3] == ["0.5", "false", "0.25"]  # optimizer.lr is from its config.yaml
    assert not list(outputs.glob("*.csv"))
    done = ddpexp("table", "outputs", "sweep.objective=eval/loss", "--out=there", cwd=tmp_path)
    assert "Best (lowest eval/loss): 0.125" in done.stdout
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["sweep.csv", "sweep.md", "sweep.png"]


def test_columns_can_be_named_and_csv_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Made(tmp_path / "sweep")
    made.job("optimizer.lr=0.1")
    made.job("optimizer.lr=0.2", points=((1, 0.25),))
    monkeypatch.chdir(tmp_path)
    assert table(call("table", "sweep", "--format", "csv")) == 0
    first, second = csv.DictReader(capsys.readouterr().out.splitlines())
    assert (first["optimizer.lr"], second["eval/loss"]) == ("0.1", "0.25")
    assert not (made.path / "sweep.csv").exists()
    assert table(call("table", "sweep", "--format", "md", "--columns", "last eval/loss")) == 0
    assert "| last eval/loss |" in capsys.readouterr().out
    runs = map(str, sorted(Path("sweep").glob("000*")))
    assert (
        table(call("table", *runs, "--columns", "eval/loss,optimizer.nesterov,step")) == 0
    )  # the second is in config.yaml alone
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["eval/loss", "optimizer.nesterov", "step"]
    assert lines[2:4] == [["0.5", "true", "30"], ["0.25", "true", "1"]]


def test_a_directory_that_cannot_be_written_is_reported_and_the_table_is_shown(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    made.job("optimizer.lr=0.1")
    (tmp_path / "file").touch()
    done = ddpexp("table", made.path, "--out", tmp_path / "file")
    assert done.returncode == 0
    assert "Best (lowest eval/loss): 0.5" in done.stdout
    assert "cannot be written (Not a directory)" in done.stderr
    assert "--out FOLDER" in done.stderr


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["table"], "table of what"),
        (["table", "SWEEP", "sweep.objectve=eval/loss"], "sweep.objectve=eval/loss: sweep.objective?"),
        (["table", "SWEEP", "sweep.mode=least"], "sweep.mode=least"),
        (["table", "SWEEP", "sweep.mode=maximize"], "sweep.mode=maximize: sweep.mode=max?"),
        (["table", "SWEEP", "sweep.objective=eval/los"], "sweep.objective=eval/los: sweep.objective=eval/loss?"),
        (["table", "SWEEP", "--uot", "x"], "table --uot: --out?"),
        (["table", "SWEEP", "--out"], "table --out: --out tables"),
        (["table", "SWEEP", "--columns"], "table --columns: optimizer.lr,eval/loss"),
        (["table", "SWEEP", "--columns=eval/los"], "--columns eval/los: --columns eval/loss?"),
        (["table", "SWEEP", "--columns", "time,trainer.sed"], "--columns trainer.sed"),
        (["table", "SWEEP", "--columns", "lr"], "--columns lr: --columns optimizer.lr?"),
        (["table", "SWEEP", "--columns", "lr,los"], "--columns lr,los: --columns optimizer.lr,eval/loss?"),
        (["table", "SWEEP", "--columns", "lr,", "eval/loss"], "--columns lr,: --columns lr,eval/loss"),
        (["table", "SWEEP", "sweep.objective=loss"], "sweep.objective=loss: sweep.objective=eval/loss?"),
        (["table", "SWEEP", "--out", "rates.csv"], "--out rates.csv: --format csv > rates.csv"),
        (["table", "SWEEP", "--csv"], "table --csv: --format csv"),
        (["table", "SWEEP", "--format", "txet"], "table --format=txet"),
        (["table", "SWEEP", "--format", "json"], "table --format json: --json"),
        (["table", "SWEEP", "--format", "csv", "--all"], "table: incompatible"),
        (["table", "SWEEP", "--format", "latex", "--out", "x"], "table: one of them"),
        (["table", "SWEEP", "--seeds"], "table --seeds: trainer.seed"),
        (["table", "SWEEP", "--json", "--seeds"], "table: --json prints"),
        (["table", "SWEEP", "--json", "--out", "x"], "table: --json prints"),
        (["table", "SWEEP", "--json", "--format", "csv"], "table: incompatible"),
        (["status", "SWEEP", "--jsn"], "status --jsn: --json?"),
        (["table", "SWEPE"], "SWEPE: ./SWEEP?"),
        (["table", "empty"], "empty: neither a sweep"),
        (["status"], "status: one directory"),
        (["status", "SWEEP", "SWEEP"], "status: one directory"),
        (["status", "--hlep"], "status --hlep: --help?"),
        (["status", "nowhere"], "nowhere: no such"),
        (["status", "."], ".: SWEEP"),
    ],
)
def test_wrong_arguments_are_refused_with_the_right_ones(
    tmp_path: Path, overrides: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Made(tmp_path / "SWEEP").job("optimizer.lr=0.1")
    run(tmp_path / "RUN")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with refused(said):
        {"table": table, "status": status}[overrides[0]](call(*overrides))
    assert capsys.readouterr().out == ""


def test_a_refusal_is_one_line_and_exit_code_2() -> None:
    done = ddpexp("table", "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ddpexp: nowhere: There is no such directory.\n"


@pytest.mark.parametrize("verb", ["table", "status"])
def test_help_shows_the_usage(verb: str) -> None:
    done = ddpexp(verb, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: ddpexp {verb} DIR")


def test_the_status_of_a_sweep_says_where_each_job_is(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    made.job("optimizer.lr=0.1")
    hold(made.job("optimizer.lr=0.2", status=None, events=("started",)))
    hold_dead(made.job("optimizer.lr=0.3", status="failed"))
    made.job("optimizer.lr=0.4", events=())
    hold(made.path)
    done = ddpexp("status", "sweep", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["status", "step", "eval/loss", "since", "where", "directory"]
    assert [line[0] for line in lines[2:6]] == ["running", "failed", "done", "waiting"]
    assert f"process {os.getpid()} on " in done.stdout
    assert "the sweep runs: " in done.stdout
    assert "4 jobs: 1 waiting, 1 running, 1 done, 1 failed." in done.stdout
    hold_dead(made.path)
    done = ddpexp("status", "sweep", cwd=tmp_path)
    assert "resume: python -m ddpexp resume sweep\n" in done.stdout


def test_a_job_that_has_diverged_is_nothing_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Made(tmp_path / "sweep")
    made.job("optimizer.lr=0.1")
    failed = made.job("optimizer.lr=9", status="failed")
    for kind, is_told in (("NonFiniteError", False), ("ValueError", True)):
        (failed / "error.json").write_text(json.dumps({"kind": kind, "rank": 0, "message": "no"}))
        assert status(call("status", str(made.path))) == 0
        assert ("resume: " in capsys.readouterr().out) is is_told


def test_the_status_of_a_run_says_what_to_type(trained: Path, tmp_path: Path) -> None:
    bad = next(trained.glob("0002_*"))
    done = ddpexp("status", bad, cwd=trained)
    assert (done.returncode, done.stderr) == (0, "")
    assert "status  failed: it ended with an error\n" in done.stdout
    assert r"why     rank 0: ValueError: no\x1b[31m luck" in done.stdout
    assert f"resume  python -m ddpexp resume {bad.name} --config-dir " in done.stdout
    good = next(trained.glob("0000_*"))
    done = ddpexp("status", good, cwd=trained)
    assert "status  done: " in done.stdout
    assert "eval/accuracy " in done.stdout
    assert "ddpexp resume" not in done.stdout


def test_a_reader_that_goes_away_is_no_trouble(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    for number in range(400):  # more than a pipe holds
        made.add("planned", job=number, name=f"{number:04d}_{'x' * 200}", overrides=[])
    command = f"{sys.executable} -m ddpexp status {made.path} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("status")


def as_json(capsys: pytest.CaptureFixture[str], verb: str, *argv: object) -> dict[str, Any]:
    assert {"table": table, "status": status}[verb](call(verb, *map(str, argv), "--json")) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


RUN_KEYS = {
    "directory", "name", "number", "status", "overrides", "values", "step", "metrics", "best", "objective", "seconds",
    "started", "ended", "job", "message", "tags", "note",
}  # fmt: skip


def test_the_status_of_a_run_is_there_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run(tmp_path / "my run", ["optimizer.lr=0.1"], status="interrupted", step=30)
    found = as_json(capsys, "status", path)
    assert set(found) == {*RUN_KEYS, "where", "resume"}
    assert found["best"] is None
    assert (found["directory"], found["status"], found["step"]) == (str(path), "interrupted", 30)
    assert (found["overrides"], found["metrics"]) == ({"optimizer.lr": "0.1"}, {"eval/loss": 0.5})
    assert found["resume"] == f"python -m ddpexp resume '{path}'"
    assert found["where"] is None


def test_the_command_to_resume_a_run_restates_the_trust_in_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = run(tmp_path / "run", status="interrupted")
    (path / "config.yaml").write_text(f"run: {{code: {tmp_path / 'my code'}, trust: [mine, other]}}\n")
    (path / "overrides.yaml").write_text("- recipe=mine\n- run.trust=[mine,other]\n")
    found = as_json(capsys, "status", path)
    assert found["resume"] == "python -m ddpexp resume run --config-dir 'my code/conf' 'run.trust=[mine,other]'"
    (path / "config.yaml").write_text("a: &a [1]\nb: *a\nrun: {code: /theirs, trust: []}\n")
    (path / "overrides.yaml").write_text("- recipe=mine\n")
    assert as_json(capsys, "status", path)["resume"] == "python -m ddpexp resume run"


def test_the_status_of_a_sweep_is_there_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Made(tmp_path / "sweep")
    made.job("optimizer.lr=0.1")
    hold(made.job("optimizer.lr=0.2", status=None, events=("started",)))
    made.job("optimizer.lr=0.3", status="failed")
    found = as_json(capsys, "status", made.path)
    assert set(found) == {"directory", "objective", "mode", "by_best", "where", "resume", "jobs"}
    assert (found["objective"], found["mode"]) == ("eval/loss", "min")
    assert [job["status"] for job in found["jobs"]] == ["done", "running", "failed"]
    assert [bool(job["where"]) for job in found["jobs"]] == [False, True, False]
    assert found["resume"].startswith("python -m ddpexp resume ")


def test_the_table_is_there_for_programs_and_writes_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Made(tmp_path / "sweep")
    for rate, seed, loss in (("0.1", 0, 0.4), ("0.1", 1, 0.6), ("0.2", 0, 0.1), ("0.2", 1, float("nan"))):
        made.job(f"optimizer.lr={rate}", f"trainer.seed={seed}", points=((10, loss),))
    before = sorted(made.path.iterdir())
    found = as_json(capsys, "table", made.path)
    assert sorted(made.path.iterdir()) == before
    assert set(found) == {"objective", "mode", "by_best", "best", "rows", "seeds"}
    assert [row["objective"] for row in found["rows"]] == [0.1, 0.4, 0.6, None]
    assert set(found["rows"][0]) == RUN_KEYS
    assert found["best"] == found["rows"][0]["directory"]
    means = [(group["overrides"], group["mean"], group["jobs"], group["done"]) for group in found["seeds"]]
    assert means == [({"optimizer.lr": "0.1"}, 0.5, 2, 2), ({"optimizer.lr": "0.2"}, None, 2, 2)]
    assert found["seeds"][0]["std"] == pytest.approx(0.1414, abs=1e-4)
