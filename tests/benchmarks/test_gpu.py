"""The benchmark on GPUs: its pieces are kept one by one, and every one runs, on the CPU and tiny."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import Results, run_pieces
from benchmarks.gpu_pieces import PIECES, stalls
from benchmarks.gpu_place import Place
from benchmarks.peers import gpt
from benchmarks.recipe.raced import Turns
from benchmarks.report import gpus_of
from benchmarks.suite import Chart, Report, Row
from tests.conftest import ROOT

SECONDS = 1800.0


def _works(place: Place) -> Report:
    assert place.folder.is_dir()
    return Report([Row("speed", "2 against 1", "2.0", met=True)], [Chart("speed", "a second", {"": {"ddpexp": [2.0]}})])


def _fails(place: Place) -> Report:
    raise RuntimeError("no luck")


FEW = {"works": (_works, 10.0), "fails": (_fails, 10.0), "long": (_works, 600.0)}


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PIECES", FEW)


@pytest.mark.usefixtures("pieces")
def test_each_piece_is_kept_at_once_and_one_that_does_not_fit_is_left(tmp_path: Path) -> None:
    results = Results(tmp_path / "gpu.json")
    assert run_pieces(["works", "fails", "long"], results, "cpu", False, 1, seconds=100.0) == ["long"]
    again = Results(tmp_path / "gpu.json")
    assert [again.has(name) for name in FEW] == [True, False, False]
    assert again.failed("fails") == "RuntimeError: no luck"
    assert again.failed("works") is None
    assert (again.machine, again.date) == (results.machine, results.date)
    assert again.report() == _works(Place(tmp_path, "cpu", True, 1))
    assert run_pieces(["long"], again, "cpu", False, 1, seconds=1000.0) == []
    assert len(Results(tmp_path / "gpu.json").report().rows) == 2


@pytest.mark.usefixtures("pieces")
def test_results_of_another_machine_are_shown_and_written_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_pieces(["works", "long"], Results(tmp_path / "gpu.json"), "cpu", True, 1, seconds=0.0)
    monkeypatch.setattr(gpu, "count_gpus", lambda: 0)
    written = []
    monkeypatch.setattr("benchmarks.report.write", lambda *arguments: written.append(arguments))
    assert gpu.main(["--out", str(tmp_path), "works", "long"]) == 0
    assert [len(entry[2].rows) for entry in written] == [2]
    assert "speed: 2 against 1; 2.0; met" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="this machine shows no GPU"):
        gpu.main(["--out", str(tmp_path), "fails"])
    with pytest.raises(SystemExit, match="there is no piece speed"):
        gpu.main(["--out", str(tmp_path), "speed"])


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

    def loss(number: int, run: Callable[[Iterator[None], Path], object]) -> float:
        folder = tmp_path / str(number)
        folder.mkdir()
        np.save(folder / "order.npy", np.random.default_rng(0).integers(0, 64, (8, 4)))
        run(gpt.steps(folder / "order.npy", folder, "tiny", 64, 8), folder)
        return float(json.loads((folder / "by_hand.json").read_text())["loss"])

    def within(steps: Iterator[None], folder: Path) -> None:
        turns = Turns(steps, str(folder), 9)
        with torch.autocast("cpu", torch.bfloat16):
            turns.take_turn()

    assert loss(0, within) == loss(1, lambda steps, _: list(steps))


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS)
def test_every_piece_runs_on_the_cpu_and_a_second_call_has_nothing_left(tmp_path: Path) -> None:
    command = ["benchmarks/on_gpu.sh", str(tmp_path), "540", "--device", "cpu", "--quick"]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "quick.json").read_text())["pieces"]
    assert list(kept) == list(PIECES)
    assert all(piece["rows"] for piece in kept.values())
    again = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60.0)
    assert again.returncode == 0
    assert "round" not in again.stdout
