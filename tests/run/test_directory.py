"""The run on disk: made exclusively, written atomically, read by anyone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ddpexp.checkpoint.format import complete_checkpoints
from ddpexp.errors import Failure, RefusedError
from ddpexp.launch import Layout
from ddpexp.run.directory import RunDir, create, remove
from ddpexp.system import files
from ddpexp.system.files import write
from tests.conftest import PATIENCE
from tests.refusals import refused

LAYOUT = Layout(nodes=1, world_size=4, device="cpu", backend="gloo", threads=2)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_without_run_dir_is_under_outputs_and_its_recipe(here: Path) -> None:
    run = create(None, "mnist")
    assert run.path.parent == Path("outputs/mnist")
    time.strptime(run.path.name, "%Y-%m-%d_%H-%M-%S")
    assert run.path.is_dir()


def test_starts_in_the_same_second_get_directories_of_their_own(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda _: "2000-01-01_00-00-00")
    names = [create(None, "mnist").path.name for _ in range(3)]
    assert names == ["2000-01-01_00-00-00", "2000-01-01_00-00-00_2", "2000-01-01_00-00-00_3"]


def test_processes_that_start_together_never_share_a_directory(here: Path) -> None:
    program = (
        "import sys, time; from ddpexp.run import directory as rundir; print(flush=True); sys.stdin.read()\n"
        "for _ in range(20): print(rundir.create(None, 'mnist').path)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()  # it has imported everything
    made = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    for process in processes:
        assert process.stdout is not None
        made += process.stdout.read().split()
        assert process.wait(timeout=PATIENCE) == 0
        process.stdout.close()
    assert len(made) == len(set(made)) == 60


def test_a_run_dir_that_is_new_or_empty_is_used(here: Path) -> None:
    assert create("a/b/c", "mnist").path == Path("a/b/c")
    Path("empty").mkdir()
    assert create("empty", "mnist").path == Path("empty")


def test_of_many_starts_in_one_run_dir_a_single_one_gets_it(here: Path) -> None:
    for round_ in range(20):
        Path(f"run{round_}").mkdir()
        gate = threading.Barrier(4)
        outcomes: list[bool] = []
        threads = [threading.Thread(target=start, args=(f"run{round_}", gate, outcomes)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=PATIENCE)
        assert sorted(outcomes) == [False, False, False, True]


def start(name: str, gate: threading.Barrier, outcomes: list[bool]) -> None:
    gate.wait(timeout=PATIENCE)
    try:
        create(name, "mnist")
    except RefusedError:
        outcomes.append(False)
    else:
        outcomes.append(True)


def test_a_directory_that_holds_something_is_refused_and_left_alone(here: Path) -> None:
    Path("full").mkdir()
    Path("full/mine.txt").write_text("x")
    Path("file").write_text("x")
    for name, word in {"full": "not empty", "file": "a file", "/dev/null": "a file"}.items():
        with refused(f"run.dir={name}: {word}"):
            create(name, "mnist")
    assert sorted(os.listdir("full")) == ["mine.txt"]


def test_a_place_where_nothing_can_be_made_is_refused_with_the_reason(here: Path) -> None:
    Path("file").write_text("x")
    for name in ("file/run", "file/deep/run"):
        with refused(f"run.dir={name}: Not a directory"):
            create(name, "mnist")
    Path("outputs").write_text("x")
    with refused("run.dir: Not a directory"):
        create(None, "mnist")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_place_is_refused(here: Path) -> None:
    Path("locked").mkdir(mode=0o500)
    with refused("run.dir=locked/run: Permission denied"):
        create("locked/run", "mnist")


def test_a_reader_sees_the_old_text_or_the_new_one_and_nothing_else(tmp_path: Path) -> None:
    path, texts = tmp_path / "result.json", ["a" * 200_000, "b" * 300_000]
    write(path, texts[0])
    stop = threading.Event()
    seen: set[str] = set()

    def read() -> None:
        while not stop.is_set():
            seen.add(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(40):
        write(path, texts[turn % 2])
    stop.set()
    reader.join(timeout=PATIENCE)
    assert seen <= set(texts)
    assert os.listdir(tmp_path) == ["result.json"]


def test_a_write_that_fails_leaves_the_old_text_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]


@pytest.mark.parametrize("text", [None, "", "{", "[]", "\0"])
def test_a_missing_or_damaged_file_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with refused(": manifest.json" if text is None else "manifest.json: damaged"):
        RunDir(tmp_path).layout()


@pytest.mark.parametrize("manifest", [{}, {"world": 3}, {"world": {"nodes": 1}}], ids=str)
def test_a_manifest_without_a_layout_is_refused(tmp_path: Path, manifest: dict[str, object]) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, **manifest}))
    with refused(": manifest"):
        RunDir(tmp_path).layout()


def test_checkpoints_are_complete_ones_the_newest_first(tmp_path: Path) -> None:
    for step, complete in [(10, True), (200, True), (3000, False)]:
        folder = tmp_path / f"step-{step:08d}"
        folder.mkdir()
        if complete:
            (folder / "checkpoint.json").write_text("{}")
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000200", "step-00000010"]
    assert complete_checkpoints(tmp_path / "nowhere") == []


def test_a_failed_run_says_why_and_where(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.fail(Failure(rank=1, host="h", kind="ValueError", message="m", step=5, phase="train"))
    assert json.loads(run.error.read_text())["rank"] == 1
    result = json.loads(run.result.read_text())
    assert (result["status"], result["step"], result["metrics"], result["weights_sha256"]) == ("failed", 5, {}, None)
    run.interrupt()
    assert json.loads(run.result.read_text())["status"] == "interrupted"
    files.write(run.result, files.dumps({"status": "done"}))
    run.interrupt()
    assert json.loads(run.result.read_text())["status"] == "done"


def test_paths_are_shown_as_short_as_the_shell_accepts_them(here: Path) -> None:
    assert files.relative(here / "outputs/run") == "outputs/run"
    assert files.relative(Path("/elsewhere")) == "/elsewhere"


def test_a_refused_run_leaves_no_converted_weights(tmp_path: Path) -> None:
    run = create(str(tmp_path / "run"), "mnist")
    for name in ("init_from.safetensors", ".init_from.safetensors.partial", "config.yaml"):
        (run.path / name).touch()
    remove(run, [run.path])
    assert not run.path.exists()


@pytest.mark.parametrize(("run_dir", "recipe"), [("runs/of-q5zk-planted/run", "x"), (None, "q5zk-planted")])
def test_a_name_that_would_hold_a_secret_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, run_dir: str | None, recipe: str
) -> None:
    monkeypatch.setenv("MY_TOKEN", "q5zk-planted")
    with refused("run.dir: MY_TOKEN"):
        create(run_dir, recipe)
    assert not any(here.iterdir())


def test_a_folder_that_is_there_may_have_a_secret_in_its_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "q5zk-planted")
    (here / "q5zk-planted").mkdir()
    assert create("q5zk-planted/run", "x").path.is_dir()


@pytest.mark.parametrize("format", [None, 0, 2, "1"])
def test_a_run_directory_of_another_format_is_refused(tmp_path: Path, format: object) -> None:
    run = RunDir(tmp_path)
    run.manifest.write_text(json.dumps({"format": format} if format is not None else {}))
    with refused(": install"):
        run.read(run.manifest)
