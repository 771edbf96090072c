"""What must hold after every fault, checked after every test of this folder."""

from __future__ import annotations

import itertools
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddpexp.checkpoint.format import scan
from tests.conftest import LEFT_SECONDS, Ddpexp, ddpexp_processes
from tests.points import Recipe

CODE = """\
PACE = float(os.environ.get("PACE", "0.02"))


class Paced(Sides):
    # Steps that take a while, so that what comes from outside meets them.
    def step(self, model, batch):
        time.sleep(PACE)
        return super().step(model, batch)
"""
SOON = (
    "trainer.timeout.init_seconds=60", "trainer.timeout.step_seconds=4", "trainer.timeout.save_seconds=4",
    "trainer.timeout.data_seconds=4",
)  # fmt: skip
"""Timeouts for tests of hangs: soon, and longer than a busy machine keeps a healthy rank from a processor."""


@pytest.fixture
def recipe(tmp_path: Path, environ: dict[str, str]) -> Iterator[Recipe]:
    """The recipe `points` with paced steps, in a folder of its own; after the test everything must hold."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    before = _left_on_the_machine()
    found = Recipe(Ddpexp(tmp_path, {**environ, "TMPDIR": str(temporary)}), CODE)
    config = found.folder / "conf/recipe/points.yaml"
    config.write_text(config.read_text().replace("points.Sides", "points.Paced"))
    yield found
    deadline = time.monotonic() + LEFT_SECONDS
    kept = ("torchelastic_", "ompi.")  # what torchrun and Open MPI leave is theirs
    while left := {*_names_in(temporary, kept), *_left_on_the_machine()} - before:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
    for run in tmp_path.glob("points*"):
        hold(run)


def hold(run: Path) -> None:
    """Check that a run directory is sound: whole files, checkpoints that load, each step recorded once."""
    for path in run.glob("*.json"):
        json.loads(path.read_text())
    for one in scan(run / "checkpoints").complete:
        assert one.problem(0, 1) is None
    metrics = run / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    for kind in ("train/loss", "eval/loss"):
        steps = [line["step"] for line in lines if kind in line]
        assert all(one < other for one, other in itertools.pairwise(steps)), f"{kind} is recorded at steps {steps}"
    if (run / "tb").is_dir():
        seen = EventAccumulator(str(run / "tb"), size_guidance={"scalars": 0}).Reload()
        for tag in seen.Tags()["scalars"]:
            steps = [event.step for event in seen.Scalars(tag)]
            assert all(one < other for one, other in itertools.pairwise(steps)), f"{tag} is recorded at steps {steps}"


def _names_in(folder: Path, kept: tuple[str, ...]) -> Iterator[Path]:
    for path in folder.iterdir():
        if not path.name.startswith(kept):
            yield path
        elif path.name == kept[0]:
            yield from path.iterdir()


def _left_on_the_machine() -> set[Path]:
    """Return the names of shared memory, and the ports that processes of ours listen on."""
    listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=False).stdout.splitlines()
    ours = [f"pid={pid}," for pid in ddpexp_processes()]
    ports = {Path(line.split()[3]) for line in listening if any(pid in line for pid in ours)}
    return {
        path for path in Path("/dev/shm").iterdir() if path.name.startswith(("torch", "ddpexp", "psm", "sem"))
    } | ports
