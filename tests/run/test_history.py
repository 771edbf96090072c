"""The starts of a run, and which configuration computed which of its steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpexp.checkpoint.format import Checkpoint
from ddpexp.run.differences import Period, Value, over_steps
from ddpexp.run.directory import RunDir
from ddpexp.run.history import periods_of, record_start, resolved_values, starts_of
from ddpexp.system.files import sha256
from tests.conftest import ROOT


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of 60 steps with a checkpoint after step 50, in which a start with another rate followed step 30."""
    run = RunDir(shutil.copytree(ROOT / "tests/samples/mnist", tmp_path / "run"))
    first = run.config.read_text()
    (run.path / "config-1.yaml").write_text(first)
    tree = yaml.safe_load(first)
    tree["optimizer"]["lr"] = 0.002
    tree["optimizer"]["fused"] = "auto"
    run.config.write_text(yaml.safe_dump(tree))
    manifest = run.read(run.manifest)
    moment = [json.loads(line)["time"] for line in run.metrics.read_text().splitlines() if '"step": 30,' in line][-1]
    change(
        run.manifest,
        resolved={"optimizer.fused": False},
        started=f"{iso(moment + 0.001)}",
        inputs={**manifest["inputs"], "config_sha256": sha256(run.config.read_text())},
        config={"sha256": [sha256(run.config.read_text())], "text": run.config.read_text()},
        earlier=[{"started": manifest["started"], "inputs": {**manifest["inputs"], "config_sha256": sha256(first)}}],
    )
    return run


def iso(moment: float) -> str:
    from datetime import datetime, timezone

    return datetime.fromtimestamp(moment, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f%z")


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def history(run: RunDir) -> list[tuple[int | None, bool]]:
    return [(start.after, start.is_exact) for start in starts_of(run, run.read(run.manifest))]


def periods(run: RunDir) -> list[Period]:
    return periods_of(run, run.read(run.manifest))


def test_a_start_follows_what_was_recorded_before_it_where_no_checkpoint_says_more(run: RunDir) -> None:
    assert history(run) == [(0, True), (30, False)]
    changed = over_steps(periods(run))
    assert changed["optimizer.lr"] == (Value(0, 0.1), Value(30, 0.002, is_exact=False))


def test_a_run_without_checkpoints_begins_with_its_newest_start(run: RunDir) -> None:
    shutil.rmtree(run.checkpoints)
    assert history(run) == [(None, True), (0, True)]
    assert [period.values["optimizer.lr"] for period in periods(run)] == [0.002]


def test_a_configuration_of_which_no_copy_is_left_is_left_out(run: RunDir) -> None:
    (run.path / "config-1.yaml").unlink()
    assert [(period.after, period.values["optimizer.lr"]) for period in periods(run)] == [(30, 0.002)]
    (run.path / "config-1.yaml").write_text("a: &a [*a]")
    assert len(periods(run)) == 1


def test_values_that_were_auto_are_those_of_the_first_start(run: RunDir) -> None:
    assert resolved_values(run, run.read(run.manifest))["optimizer.fused"] is False
    assert resolved_values(run, None)["optimizer.fused"] == "auto"


def test_a_start_records_those_that_led_to_its_checkpoint() -> None:
    assert record_start({"started": "now"}, None) == [{"started": "now", "after": 0}]
    older = Checkpoint(Path(), {"step": 20, "inputs": {"starts": [{"started": "then", "after": 0}]}}, {})
    assert record_start({"started": "now"}, older) == [
        {"started": "then", "after": 0},
        {"started": "now", "after": 20},
    ]
