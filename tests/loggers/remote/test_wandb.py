"""wandb itself, offline: what it has of a run that was sent in several attempts; and what is refused without it."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ddpexp.loggers.remote.wandb import WandB
from ddpexp.loggers.remote.wandb_file import records
from tests import extras
from tests.conftest import PATIENCE, ROOT

READ = """
import json, sys
from wandb.proto import wandb_internal_pb2
from ddpexp.loggers.remote.wandb_file import records
rows, config, exits = [], {}, 0
for path in sys.argv[1:]:
    for data in records(open(path, "rb").read()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        row = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        if row:
            rows.append({name: json.loads(value) for name, value in row.items()})
        config |= {item.key: json.loads(item.value_json) for item in record.config.update}
        exits += record.WhichOneof("record_type") == "exit"
print(json.dumps([rows, config, exits]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return extras.make(tmp_path_factory.mktemp("extras") / "venv", "wandb")


def run_python(python: str, *arguments: str, **variables: str) -> str:
    environ = extras.environ(WANDB_MODE="offline", **variables)
    done = subprocess.run([python, *arguments], env=environ, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def recorded(python: str, run: Path) -> tuple[list[dict[str, Any]], dict[str, Any], int]:
    files = sorted(map(str, run.glob("wandb/offline-run-*/run-*.wandb")))
    assert len({Path(path).name for path in files}) == 1, "every attempt continues the same run"
    rows, config, exits = json.loads(run_python(python, "-c", READ, *files))
    return rows, config, exits


@pytest.mark.slow
def test_what_an_interrupted_process_did_not_write_is_sent_again_and_nothing_else(python: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(ROOT / "tests/samples/mnist", run)
    values = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    media = {
        "step": values[-1]["step"],
        "time": 1.0,
        "kind": "histogram",
        "name": "w",
        "counts": [2, 1],
        "edges": [0, 1, 2],
    }
    (run / "media.jsonl").write_text(json.dumps(media) + "\n")
    sync = ("-m", "ddpexp", "sync", str(run), "logger=wandb", "--json")
    steps = sorted({row["step"] for row in values})
    assert json.loads(run_python(python, *sync))["loggers"]["wandb"] == {"sent": len(steps), "left": 0, "problem": None}
    rows, config, exits = recorded(python, run)
    assert [row["_step"] for row in rows] == steps
    assert exits == 1
    assert config["trainer"]["seed"] == 0

    [file] = run.glob("wandb/offline-run-*/run-*.wandb")
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])
    rows, _, _ = recorded(python, run)
    assert 0 < len(rows) < len(steps)
    mark = json.loads((run / "remote/wandb.json").read_text())
    (run / "remote/wandb.json").write_text(json.dumps({**mark, "ended": False}))
    with (run / "metrics.jsonl").open("a") as more:
        more.write(json.dumps({"step": steps[-1] + 1, "epoch": 9.0, "time": 2.0, "train/loss": 1.0}) + "\n")
    assert json.loads(run_python(python, *sync))["loggers"]["wandb"]["left"] == 0
    rows, _, _ = recorded(python, run)
    assert [row["_step"] for row in rows] == [*steps, steps[-1] + 1]
    for row in rows:
        expected: dict[str, Any] = {}
        for record in values:
            expected |= record if record["step"] == row["_step"] else {}
        assert all(row[name] == value for name, value in expected.items() if "/" in name)
    assert [row["_step"] for row in rows if "w" in row] == [steps[-1]]


def test_nothing_secret_is_in_the_files_of_wandb(python: str, tmp_path: Path) -> None:
    value = "q5zk-planted-7wyx"
    run = tmp_path / f"of-{value}" / f"run-{value}"
    shutil.copytree(ROOT / "tests/samples/mnist", run)
    with (run / "metrics.jsonl").open("a") as more:
        more.write(json.dumps({"step": 10**6, "epoch": 9.0, "time": 2.0, f"train/{value}": 1.0}) + "\n")
    keys = ("group", "project", "entity")
    typed = [f"logger.wandb.{key}={value}" for key in keys] + [f"logger.wandb.tags=[{value}]"]
    sync = ("-m", "ddpexp", "sync", str(run), "logger=wandb", *typed, "--json")
    shown = run_python(python, *sync, DDPEXP_SECRETS="MINE", MINE=value)
    assert json.loads(shown)["loggers"]["wandb"]["left"] == 0
    [file] = run.glob("wandb/offline-run-*/run-*.wandb")
    assert b"${MINE}" in file.read_bytes()
    sent = [path for path in (run / "wandb").rglob("*") if path.is_file() and not path.name.startswith("debug")]
    assert len(sent) > 0
    for path in sent:  # wandb's logs of itself, which it does not send, have the path of the folder that they are in
        assert value.encode() not in path.read_bytes(), path
    assert value.encode() not in (run / "remote/wandb.json").read_bytes()


OPENED = """
import sys
from pathlib import Path
import wandb
from ddpexp.loggers.remote.base import RunInfo
from ddpexp.loggers.remote.wandb import WandB
WandB(RunInfo(Path(sys.argv[1]), "mine", "abc", {}), mode="offline").open()
print(wandb.run.settings.base_url, wandb.Settings().base_url, wandb.run.entity, wandb.run.project)
"""


def test_the_settings_of_wandb_in_the_current_folder_and_in_the_run_do_not_count(python: str, tmp_path: Path) -> None:
    for place in ("", "run"):
        folder = tmp_path / place / "wandb"
        folder.mkdir(parents=True)
        (folder / "settings").write_text("[default]\nbase_url = http://127.0.0.1:9\nentity = evil\nproject = evil\n")
    done = subprocess.run(
        [python, "-c", OPENED, str(tmp_path / "run")], env=extras.environ(), cwd=tmp_path, capture_output=True,
        text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    server, default, *owner = done.stdout.split()
    assert server == default
    assert owner == ["mine"]  # the project, and no entity


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([(1, b"one"), (1, b"two")], [b"one", b"two"]),
        ([(2, b"fir"), (3, b"st-"), (4, b"last"), (1, b"x")], [b"first-last", b"x"]),
        ([(1, b"one"), (2, b"begun")], [b"one"]),
        ([], []),
    ],
)
def test_the_records_of_a_file_are_its_whole_ones(pieces: list[tuple[int, bytes]], expected: list[bytes]) -> None:
    data = b":W&B\0\0\0" + b"".join(struct.pack("<IHB", 0, len(part), kind) + part for kind, part in pieces)
    assert list(records(data)) == expected
    assert list(records(data[:-1])) == (expected[:-1] if pieces and pieces[-1][0] in (1, 4) else expected)


@pytest.mark.parametrize(
    ("keys", "environ", "login"),
    [
        ({"mode": "offline"}, {}, None),
        ({}, {"WANDB_MODE": "offline"}, None),
        ({}, {"WANDB_API_KEY": "k"}, None),
        ({}, {}, "machine api.wandb.ai login user password k"),
        ({}, {"WANDB_BASE_URL": "https://wandb.corp.example"}, "machine wandb.corp.example login user password k"),
    ],
)
def test_a_login_is_found_where_wandb_finds_it(
    keys: Mapping[str, Any],
    environ: Mapping[str, str],
    login: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    (tmp_path / ".netrc").write_text(login or "machine other.example login user password k")
    assert WandB.problem("logger.wandb", keys, {"HOME": str(tmp_path), **environ}) is None


def test_without_the_package_or_a_login_a_sentence_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = {"HOME": str(tmp_path)}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert WandB.problem("logger.wandb", {}, home) == (
        "logger.wandb needs the package wandb: pip install 'ddpexp[wandb]'."
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    problem = WandB.problem("logger.wandb", {"mode": None}, home) or ""
    assert problem.startswith("logger.wandb: wandb has no API key: run `wandb login`, set WANDB_API_KEY, or use")
    (tmp_path / ".netrc").write_text("machine wandb.corp.example login user password k")
    assert WandB.problem("logger.wandb", {}, home) == problem
