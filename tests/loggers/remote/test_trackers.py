"""wandb and a real MLflow server: kills, an outage, and what each has of a run in the end."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import extras
from tests.conftest import PATIENCE, ROOT
from tests.loggers.remote.test_wandb import recorded
from tests.records import timeless

pytestmark = pytest.mark.slow
KILLS = 30
RUN = (
    "recipe=mnist", "data.source=embedded", "data.embedded_train=6400", "data.embedded_test=200", "trainer.threads=1",
    "trainer.global_batch_size=64", "trainer.log_every=10", "trainer.eval_every=100", "trainer.checkpoint_every=50",
    "scheduler=constant", "trainer.epochs=100000",
)  # fmt: skip
BOTH = ("logger=[wandb,mlflow]", "logger.wandb.end_seconds=60", "logger.mlflow.end_seconds=60")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return extras.make(tmp_path_factory.mktemp("extras") / "venv", "wandb", "mlflow")


class Server:
    """An MLflow server with a database, which can be stopped and started again."""

    def __init__(self, python: str, folder: Path) -> None:
        self.python, self.folder = python, folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = ["server", "--backend-store-uri", f"sqlite:///{self.folder}/ml.db", "--artifacts-destination"]
        words += [str(self.folder / "artifacts"), "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.python, "-m", "mlflow", *words], stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        pytest.fail((self.folder / "server.log").read_text())

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def ask(self, path: str, **values: Any) -> Any:
        request = urllib.request.Request(
            f"{self.url}/api/2.0/mlflow/{path}", json.dumps(values).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def history(self, run_id: str, name: str) -> list[tuple[int, float]]:
        query = f"{self.url}/api/2.0/mlflow/metrics/get-history?run_id={run_id}&metric_key={name}&max_results=20000"
        with urllib.request.urlopen(query, timeout=60) as answer:
            return [(int(metric.get("step", 0)), metric["value"]) for metric in json.load(answer).get("metrics", [])]


@pytest.fixture(scope="module")
def server(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    serving = Server(python, tmp_path_factory.mktemp("mlflow"))
    serving.start()
    yield serving
    serving.stop()


@contextmanager
def started(python: str, server: Server, *words: str) -> Iterator[subprocess.Popen[str]]:
    environ = extras.environ(WANDB_MODE="offline", MLFLOW_TRACKING_URI=server.url)
    process = subprocess.Popen(
        [python, "-m", "ddpexp", *words],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE)


def ended(python: str, server: Server, *words: str) -> str:
    with started(python, server, *words) as process:
        out, _ = process.communicate(timeout=4 * PATIENCE)
    assert process.returncode == 0, out
    return out


def records_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def check_everything_arrived_once(python: str, server: Server, run: Path) -> None:
    """Compare what each logger has with metrics.jsonl, but for what differs between equal runs."""
    expected = {
        (name, record["step"]): value
        for record in records_of(run)
        for name, value in timeless(record).items()
        if "/" in name
    }
    rows, _, _ = recorded(python, run)
    seen = [
        (name, row["_step"], value) for row in rows for name, value in row.items() if (name, row["_step"]) in expected
    ]
    assert max(Counter((name, step) for name, step, _ in seen).values()) == 1
    assert {(name, step): value for name, step, value in seen} == pytest.approx(expected)

    experiment = server.ask("experiments/search", max_results=10)["experiments"]
    found = server.ask("runs/search", experiment_ids=[one["experiment_id"] for one in experiment])["runs"]
    [info] = [one["info"] for one in found if one["info"]["run_name"] == run.name]
    assert info["status"] == "FINISHED"
    names = {name for name, _ in expected}
    histories = {name: server.history(info["run_id"], name) for name in names}
    points = [((name, step), value) for name, history in histories.items() for step, value in history]
    assert max(Counter(key for key, _ in points).values()) == 1
    assert dict(points) == pytest.approx(expected)


@pytest.mark.timeout(3600)
def test_after_thirty_kills_each_logger_has_each_step_once_and_the_weights_are_equal(
    python: str, server: Server, tmp_path: Path
) -> None:
    run, plain, moment = tmp_path / "killed", tmp_path / "plain", random.Random(7)
    words: tuple[str, ...] = (*RUN, *BOTH, f"run.dir={run}")
    for number in range(KILLS):
        watched = run / ("metrics.jsonl", "remote/wandb.json", "remote/mlflow.json")[number % 3]
        before = _changed_at(watched)
        with started(python, server, *words) as process:
            while _changed_at(watched) == before and process.poll() is None:
                time.sleep(0.01)
            time.sleep(moment.uniform(0.0, 3.0))  # after the first record, or after a logger was first sent something
            assert process.poll() is None, process.communicate()[0]
            process.send_signal(signal.SIGKILL)
        words = ("resume", str(run))
    steps = (records_of(run)[-1]["step"] // 100 + 1) * 100
    ended(python, server, "resume", str(run), f"trainer.max_steps={steps}")
    ended(python, server, *RUN, "logger=none", f"run.dir={plain}", f"trainer.max_steps={steps}")
    hashes = [json.loads((folder / "result.json").read_text())["weights_sha256"] for folder in (run, plain)]
    assert hashes[0] == hashes[1]
    check_everything_arrived_once(python, server, run)


def _changed_at(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


@pytest.mark.timeout(1200)
def test_a_server_that_is_down_for_a_minute_costs_nothing(python: str, tmp_path: Path) -> None:
    run, server = tmp_path / "outage", Server(python, tmp_path)
    try:
        check_outage(python, server, run)
    finally:
        server.stop()


def check_outage(python: str, server: Server, run: Path) -> None:
    server.start()
    with started(python, server, *RUN, *BOTH, f"run.dir={run}") as process:
        _until(lambda: "train/loss" in json.loads((run / "remote/mlflow.json").read_text())["sent"])
        server.stop()
        time.sleep(60)
        before = records_of(run)[-1]["step"]
        server.start()
        _until(lambda: "logger.mlflow has everything again" in (run / "run.log").read_text())
        assert json.loads((run / "remote/mlflow.json").read_text())["sent"]["train/loss"] > before
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=PATIENCE)
    steps = (records_of(run)[-1]["step"] // 100 + 1) * 100
    assert out.count("logger.mlflow waits (") == 1
    ended(python, server, "resume", str(run), f"trainer.max_steps={steps}")
    check_everything_arrived_once(python, server, run)
    seconds = [record["time"] for record in records_of(run) if "train/loss" in record]
    print("steps a second:", 10 * len(seconds) / (seconds[-1] - seconds[0]))


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            if condition():
                return
        except (OSError, KeyError, ValueError):
            pass  # it is not there yet
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_server_gets_the_configuration_media_and_the_best_checkpoint(
    python: str, server: Server, tmp_path: Path
) -> None:
    run = tmp_path / "media"
    more = ("callbacks=histograms", "callbacks.histograms.every=20", "trainer.keep_best=min:eval/loss")
    artifact = ("logger.mlflow.checkpoint=best", "logger.wandb.checkpoint=best")
    ended(python, server, *RUN, *BOTH, *more, *artifact, "trainer.max_steps=100", f"run.dir={run}")
    check_everything_arrived_once(python, server, run)
    files = {str(path.relative_to(server.folder)) for path in server.folder.rglob("*") if path.is_file()}
    for name in ("images/predictions/step-00000100.png", "checkpoints/step-00000100/model.safetensors"):
        assert any(file.endswith(name) for file in files), name
    assert any("histograms/weights/" in file for file in files)
    experiments = server.ask("experiments/search", max_results=10)["experiments"]
    found = server.ask("runs/search", experiment_ids=[one["experiment_id"] for one in experiments])["runs"]
    [data] = [one["data"] for one in found if one["info"]["run_name"] == "media"]
    assert {"key": "trainer.seed", "value": "0"} in data["params"]
    best = json.loads((run / "result.json").read_text())["best"]
    metrics = {metric["key"]: metric["value"] for metric in data["metrics"]}
    assert (metrics["best/step"], metrics["best/eval/loss"]) == (best["step"], best["value"])


def test_nothing_secret_is_in_the_database_and_artifacts_of_mlflow(python: str, tmp_path: Path) -> None:
    value = "q5zk-planted-7wyx"
    run, store = tmp_path / f"of-{value}" / f"run-{value}", tmp_path / "store"
    shutil.copytree(ROOT / "tests/samples/mnist", run)
    text = {"step": 10**6, "time": 2.0, "kind": "text", "name": f"a {value}", "text": f"b {value}"}
    (run / "media.jsonl").write_text(json.dumps(text) + "\n")
    with (run / "metrics.jsonl").open("a") as more:
        more.write(json.dumps({"step": 10**6, "epoch": 9.0, "time": 2.0, f"train/{value}": 1.0}) + "\n")
    store.mkdir()
    variables = {"MLFLOW_TRACKING_URI": f"sqlite:///{store}/ml.db", "DDPEXP_SECRETS": "MINE", "MINE": value}
    sync = ["-m", "ddpexp", "sync", str(run), "logger=mlflow", f"logger.mlflow.experiment={value}", "--json"]
    done = subprocess.run(
        [python, *sync], env=extras.environ(**variables), cwd=store, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loggers"]["mlflow"]["left"] == 0
    found = {str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()}
    assert b"${MINE}" in found["ml.db"]
    assert not [name for name, content in found.items() if value.encode() in content or value in name]
