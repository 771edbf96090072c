"""The benchmark on GPUs: findings are kept one by one, it ends in time, and every piece runs, tiny and on the CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import gpu, gpu_goals
from benchmarks.gpu import Results, run_pieces
from benchmarks.gpu_correct import _tests
from benchmarks.gpu_goals import GOALS, README, Finding, Outcome, table, with_table
from benchmarks.gpu_pieces import PIECES, Piece
from benchmarks.gpu_place import CutError, Place, descendants
from benchmarks.gpu_speed import _in_turn, stalls
from benchmarks.peers import gpt
from benchmarks.recipe.raced import Turns
from benchmarks.report import FOLDER, gpus_of
from benchmarks.suite import Chart, Row
from tests.conftest import PATIENCE, ROOT

SECONDS = 3600.0
FOUND = Row("speed", "2 against 1", "2.0", met=True)
CHART = Chart("speed", "a second", {"": {"ddpexp": [2.0]}})
SLEEPS = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '600'])"]


def works(place: Place) -> Iterator[Finding]:
    assert place.folder.is_dir()
    yield FOUND
    yield Outcome("tests/test_speed.py::test_speed", "passed", 0.5)
    yield CHART


def fails(place: Place) -> Iterator[Finding]:
    yield FOUND
    raise RuntimeError("no\nluck | none")


def stays(place: Place) -> Iterator[Finding]:
    yield FOUND
    place.run(SLEEPS)


FEW = {
    "several": Piece(works, 10.0, gpus=2, correctness=True),
    "fails": Piece(fails, 10.0),
    "works": Piece(works, 10.0, correctness=True),
    "short": Piece(stays, 0.5),
    "stays": Piece(stays, 100.0),
    "later": Piece(works, 10.0),
}


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PIECES", FEW)


@pytest.mark.usefixtures("pieces")
def test_each_finding_is_kept_at_once_and_a_piece_is_ended_when_the_time_is_over(tmp_path: Path) -> None:
    others = set(descendants())  # of other tests of this process
    run_pieces(list(FEW), Results(tmp_path / "gpu.json"), "cpu", False, 1, seconds=6.0)
    assert set(descendants()) <= others  # none of a program that had started another
    again = Results(tmp_path / "gpu.json")
    assert {name: again.state(name) for name in FEW} == {
        "several": "skipped: needs 2 GPUs, and this machine shows 1",
        "fails": "failed: RuntimeError: no\nluck | none",
        "works": "done",
        "short": "cut after 0 s",
        "stays": "cut: the time was over",
        "later": "not begun",
    }
    assert again.missing(list(FEW)) == ["later", "fails", "stays"]
    assert again.pieces["stays"]["rows"] == [asdict(FOUND)]
    assert again.pieces["works"]["tests"][0]["outcome"] == "passed"
    assert again.report().charts == [CHART]
    assert "failed: RuntimeError: no luck \\| none" in [row.figures for row in again.report().rows]
    run_pieces(["later"], again, "cpu", False, 1, seconds=10.0)
    assert Results(tmp_path / "gpu.json").state("later") == "done"


@pytest.mark.usefixtures("pieces")
def test_the_file_that_comes_back_is_small_whatever_fails(tmp_path: Path) -> None:
    results = Results(tmp_path / "gpu.json")
    results.begin("works")
    for number in range(1000):
        results.pieces["works"]["tests"].append(asdict(Outcome(f"test_{number}", "failed", 1.0, 1500 * "x")))
    results.keep("works", FOUND)
    assert (tmp_path / "gpu.json").stat().st_size <= gpu.MOST_BYTES
    assert len(Results(tmp_path / "gpu.json").pieces["works"]["tests"]) == 1000


@pytest.mark.usefixtures("pieces")
def test_results_of_another_machine_are_shown_and_written_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_pieces(["works"], Results(tmp_path / "gpu.json"), "cpu", True, 1, seconds=10.0)
    monkeypatch.setattr(gpu, "count_gpus", lambda: 0)
    written: list[tuple[object, ...]] = []
    monkeypatch.setattr("benchmarks.report.write", lambda *arguments: written.append(arguments))
    monkeypatch.setattr(gpu, "write_readme", lambda found: written.append((found,)))
    for out in (tmp_path, tmp_path / "gpu.json"):
        assert gpu.main(["--out", str(out), "--only", "correctness"]) == 0
        shown = capsys.readouterr().out
        assert "speed: 2 against 1; 2.0; met" in shown
        assert "left: several;" in shown
    assert [len(written), len(written[0]), len(written[1])] == [4, 5, 1]
    assert gpu.main(["--out", str(tmp_path / "quick.json"), "--device", "cpu", "--quick", "works"]) == 0
    assert gpu.main(["--out", str(tmp_path / "quick.json"), "works"]) == 0
    assert len(written) == 4  # of what was only tried nothing is written
    with pytest.raises(SystemExit, match="this machine shows no GPU"):
        gpu.main(["--out", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="there is no piece speed"):
        gpu.main(["--out", str(tmp_path), "speed"])


def test_what_shows_correctness_comes_before_what_shows_speed() -> None:
    kinds = [piece.correctness for piece in PIECES.values()]
    assert kinds == sorted(kinds, reverse=True)
    on_one = [piece.seconds for piece in PIECES.values() if piece.gpus == 1]
    assert sum(on_one) < 2 * (430 + 390)  # each is ended at about twice of what it takes


def test_readme_has_the_figures_that_are_kept() -> None:
    kept = json.loads((FOLDER / "results.json").read_text()).get("gpu")
    text = README.read_text()
    assert with_table(text, table(kept)) == text
    assert table(kept) in text


def test_a_goal_shows_what_was_measured_or_that_nothing_was() -> None:
    name, other = list(GOALS)[:2]
    rows = [asdict(Row(f"{name}, twice", "2 against 1", "0.950 (0.9 to 1.0)", bar="≥ 0.98", met=False))]
    lines = table({"date": "2026-01-01", "machine": "1 x GPU", "rows": rows}).splitlines()
    assert lines[0] == "2026-01-01, 1 x GPU."
    assert "| twice: 2 against 1 (0.950), **missed** |" in lines[4]
    assert "| not measured yet |" in lines[5]
    assert all(line.startswith("| ") for line in table(None).splitlines()[2:])
    assert gpu_goals.bar(other).met(1.0)


def place(folder: Path, seconds: float) -> Place:
    return Place(folder, "cpu", True, 1, time.monotonic() + seconds)


def collected(findings: Iterator[Finding]) -> tuple[list[Finding], bool]:
    """Return what a piece finds, and whether it was ended."""
    found: list[Finding] = []
    try:
        found.extend(findings)
    except CutError:
        return found, True
    return found, False


class UntilTwoTests(Place):
    """A place whose time is over when two tests have ended."""

    def left(self) -> float:
        return 0.0 if len((self.folder / "tests.jsonl").read_text().splitlines()) == 2 else PATIENCE


TESTS = """
import os, time, pytest

def test_passes(): pass
def test_fails(): assert 1 == 2
@pytest.mark.skip(reason="no luck")
def test_is_skipped(): pass
def test_hangs(): time.sleep(600)
def test_passes_afterwards(): pass
def test_outlasts_the_time(): time.sleep(600)
"""


@pytest.mark.slow
def test_tests_are_kept_one_by_one_and_each_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu_correct.ROOT", tmp_path)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # these tests are not shared out
    path = tmp_path / "test_few.py"
    path.write_text(TESTS)
    for name in ("absent_package", "ddpexp.absent"):
        (tmp_path / f"test_{name.partition('.')[0]}.py").write_text(f"import {name}\n")
    files = [str(file) for file in sorted(tmp_path.glob("test_*.py"))]
    whole, cut = collected(_tests(place(tmp_path, PATIENCE), "few", files, "-k", "not outlasts", seconds=5))
    outcomes = {re.split("[_/]", one.test)[-1]: one for one in whole if isinstance(one, Outcome)}
    assert {name: one.outcome for name, one in outcomes.items()} == {
        "passes": "passed", "fails": "failed", "skipped": "skipped", "hangs": "failed", "afterwards": "passed",
        "package.py": "skipped", "ddpexp.py": "failed",
    }  # fmt: skip
    assert "assert 1 == 2" in outcomes["fails"].text
    assert outcomes["skipped"].text == "no luck"
    assert "had not ended after 5 s" in outcomes["hangs"].text
    assert outcomes["package.py"].text == "absent_package is not installed"
    assert isinstance(whole[-1], Row)
    assert (whole[-1].figures, whole[-1].met, cut) == ("2 passed, 3 failed, 2 skipped", False, False)
    (tmp_path / "tests.jsonl").unlink()
    until = UntilTwoTests(tmp_path, "cpu", True, 1)
    some, cut = collected(_tests(until, "few", [str(path)], "-k", "passes or outlasts"))
    assert cut
    assert [one.outcome for one in some if isinstance(one, Outcome)] == ["passed", "passed"]


def test_a_comparison_that_is_ended_has_the_blocks_until_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], [4e-3, 2e-3, 1e-3, 1e-3], [4e-3, 2e-3, 1e-3, 1e-3]]
    (tmp_path / "blocks.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def command(self: Place, run: Path, *overrides: str) -> Sequence[str]:
        return SLEEPS

    monkeypatch.setattr(Place, "command", command)
    found, cut = collected(_in_turn(place(tmp_path, 0.5), gpu_goals.PERCEPTRON, tmp_path, 8, 4, []))
    assert cut
    [row, chart] = found
    assert isinstance(row, Row)
    assert (row.value, row.met, row.note) == (0.5, False, "ended after 2 blocks")
    assert row.figures == "250.0 against 500.0; +2000.0 us a step"
    assert isinstance(chart, Chart)


def test_the_stall_of_a_save_is_what_the_step_behind_it_takes_longer() -> None:
    times, now = [], 0.0
    for step in range(1, 14):
        now += {4: 6.0, 7: 2.0, 10: 3.0, 13: 2.5}.get(step, 1.0)  # each save follows a multiple of 3
        times.append((step, now))
    assert stalls(times, 3) == {"step": 1.0, "first": 5.0, "later": 1.5}


def test_the_gpus_of_a_machine_are_counted_without_their_instances() -> None:
    text = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-11111111-aaaa-bbbb-cccc-000000000000)
  MIG 3g.20gb     Device  0: (UUID: MIG-22222222-aaaa-bbbb-cccc-000000000000)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-33333333-aaaa-bbbb-cccc-000000000000)
GPU 2: NVIDIA RTX A6000 (UUID: GPU-44444444-aaaa-bbbb-cccc-000000000000)
"""
    assert gpus_of(text) == ", 2 x NVIDIA A100-SXM4-40GB, 1 x NVIDIA RTX A6000"
    assert gpus_of("No devices found.\n") == ""


def test_the_loop_by_hand_trains_within_a_task_as_it_does_alone(tmp_path: Path) -> None:
    """A task runs in autocast, which keeps weights that were cast until the outermost one ends."""

    def loss(run: Callable[[Iterator[None], Path], object], micro_batches: int = 1) -> float:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        np.save(folder / "order.npy", np.random.default_rng(0).integers(0, 64, (8, 4)))
        run(gpt.steps(folder / "order.npy", folder, "tiny", 64, 8, micro_batches, clip=1.0), folder)
        return float(json.loads((folder / "by_hand.json").read_text())["loss"])

    def within(steps: Iterator[None], folder: Path) -> None:
        turns = Turns(steps, str(folder), 9)
        with torch.autocast("cpu", torch.bfloat16):
            turns.take_turn()

    alone = loss(lambda steps, _: list(steps))
    assert loss(within) == alone
    assert loss(lambda steps, _: list(steps), micro_batches=2) == pytest.approx(alone, rel=0.02)


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_every_piece_runs_on_the_cpu_and_a_second_call_has_nothing_left(tmp_path: Path) -> None:
    command = ["benchmarks/on_gpu.sh", str(tmp_path), str(int(SECONDS)), "--device", "cpu", "--quick"]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "quick.json").read_text())["pieces"]
    assert {name: piece["state"] for name, piece in kept.items()} == dict.fromkeys(PIECES, "done")
    rows = [row for piece in kept.values() for row in piece["rows"]]
    assert [row for row in rows if row["met"] is False and not row["bar"].startswith(("≤", "≥"))] == []
    again = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60.0)
    assert again.returncode == 0
    assert " ...\n" not in again.stdout
