"""The process of a job: it is no second sweep, whatever becomes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddpexp.sweep.folder import EventLog, SweepDir
from ddpexp.system.streams import MaskedText
from tests.conftest import PATIENCE, finish
from tests.sweep.conftest import Sweeps

PROGRAM = """\
from pathlib import Path
from ddpexp.sweep import job
job._run = lambda *_: print("last words", end="") or 3
print(job.start(None, (), None, {}, Path("/dev/full")).wait())
"""


def test_a_job_that_cannot_write_its_last_line_still_ends(environ: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.stdout, done.stderr) == ("3\n", "")


def test_a_record_that_cannot_be_written_is_reported_once_and_ends_no_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = EventLog(SweepDir(tmp_path))
    record.close()
    record._file = MaskedText(open("/dev/full", "wb"))  # noqa: SIM115
    record.add("sweep")
    record.add("planned", job=0)
    record.close()
    assert capsys.readouterr().err == (
        "ddpexp: warning: /dev/full cannot be written (No space left on device): what happens is not recorded\n"
    )


@pytest.mark.fault(23)
@pytest.mark.parametrize("room", ["4k", "8k", "12k"])
def test_a_sweep_on_a_full_disk_is_refused_in_one_sentence(sweeps: Sweeps, tmp_path: Path, room: str) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={room}", "none", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr}")
    try:
        process, path = sweeps.start("trainer.seed=0,1", path=place / "sweep")
        ended = finish(process, path)
    finally:
        subprocess.run(["umount", str(place)], check=True)
    assert ended.code == 2
    [said] = [line for line in ended.err.splitlines() if not line.startswith("sweep of ")]
    assert "cannot be written: No space left on device" in said


SCARCE = """\
import os, sys
refused = set(map(int, sys.argv.pop(1).split(",")))  # of the forks; the system's own refusal comes when it likes
fork, calls = os.fork, []
def scarce():
    calls.append(1)
    if len(calls) in refused:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = scarce
from ddpexp.__main__ import run
run()
"""


@pytest.mark.variants(1)
@pytest.mark.fault(23)
@pytest.mark.parametrize(("refused", "code"), [("2,3", 0), ("1", 1)])
def test_a_job_that_cannot_be_started_waits_for_those_that_run_and_else_fails(
    sweeps: Sweeps, refused: str, code: int
) -> None:
    overrides, path = sweeps.words("trainer.seed=0,1")
    program = [sys.executable, "-c", SCARCE, refused, *overrides]
    folder, environ = sweeps.recipe.ddpexp.folder, sweeps.recipe.ddpexp.environ
    done = subprocess.run(program, cwd=folder, env=environ, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == code, done.stderr
    ended = [
        (event["job"], event["status"])
        for event in map(json.loads, (path / "sweep.jsonl").read_text().splitlines())
        if event["event"] == "ended"
    ]
    assert sorted(ended) == [(0, "failed" if code else "done"), (1, "done")]
    assert code == 0 or "its process could not be started: Resource temporarily unavailable" in done.stderr
