"""What Slurm's queue holds, asked of a real one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ddpexp.launch import slurm
from ddpexp.launch.slurm import queue


@pytest.mark.slurm
def test_the_jobs_of_an_array_are_known_by_both_of_their_names(tmp_path: Path) -> None:
    if "SLURM_CONF" not in os.environ:
        pytest.skip("SLURM_CONF is not set: there is no Slurm cluster to run on")
    words = ["sbatch", "--parsable", "--hold", "--array=0-1", f"--output={tmp_path}/%a", "--wrap=true"]
    job_id = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30, cwd=tmp_path).stdout.strip()
    try:
        found = queue(os.getuid())
        assert found is not None
        assert found[f"{job_id}_0"] == found[f"{job_id}_1"] == "PENDING"
        assert job_id in found  # one of them has the number of the array
        assert queue(os.getuid() + 54321) == {}
    finally:
        subprocess.run(["scancel", job_id], check=True, timeout=30)


def test_without_slurm_nobody_knows_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert queue(os.getuid()) is None


def test_a_slurm_that_does_not_answer_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none.conf"))  # squeue looks for it for a minute
    monkeypatch.setattr(slurm, "_ANSWER_SECONDS", 0.2)
    assert queue(os.getuid()) is None
