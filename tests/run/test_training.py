"""How a training records its end, without any worker."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.errors import Failure, RefusedError, StoppedError
from ddpexp.launch import Done, Failed, Interrupted, Layout, Outcome, Participants
from ddpexp.run import directory, lock
from ddpexp.run import training as start
from ddpexp.run.directory import RunDir
from ddpexp.run.training import Training
from tests.refusals import refused


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    monkeypatch.chdir(tmp_path)
    composed = compose(["recipe=mnist", "data.source=embedded", "trainer.nodes=1:2", "launcher=elastic", "run.dir=run"])
    assert composed is not None
    training = Training(parse(composed.values), composed.text, composed.overrides, ["ddpexp"])
    work = training.job.lifecycle.begin(Layout(1, 1, "cpu", "gloo", 1), Participants(["here"]))
    assert (work.logs, lock.read(Path("run", lock.NAME)) is not None) == (RunDir(Path("run")).ranks, True)
    yield training
    training.end(None)


FAILED = Failure.of_command("ValueError", "no.")


@pytest.mark.parametrize(
    ("outcome", "status", "is_locked"),
    [
        (None, None, False),
        (Done(), None, False),  # rank zero writes the result of a run that is done
        (Interrupted(3, saved=True), "interrupted", False),
        (Failed(FAILED), "failed", False),
        (Failed(FAILED, workers_live=True), "failed", True),
    ],
)
def test_the_end_is_recorded_and_the_lock_released_once_no_worker_lives(
    begun: Training, outcome: Outcome | None, status: str | None, is_locked: bool
) -> None:
    begun.end(outcome)
    run = RunDir(Path("run"))
    assert (run.status(), lock.read(run.path / lock.NAME) is not None) == (status, is_locked)


def test_a_refusal_removes_the_directory_that_this_start_has_created(begun: Training) -> None:
    begun.end(Failed(Failure.of_refusal(RefusedError("no."))))
    assert not Path("run").exists()


def test_a_stop_before_anything_is_written_removes_the_directory_that_this_start_has_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    composed = compose(["recipe=mnist", "data.source=embedded", "trainer.micro_batch_size=fit", "run.dir=a/run"])
    assert composed is not None
    training = Training(parse(composed.values), composed.text, composed.overrides, ["ddpexp"])

    def stop(*_: object) -> dict[str, int]:
        assert lock.read(Path("a/run", lock.NAME)) is not None
        raise StoppedError(signal.SIGTERM)  # where a signal arrives while sizes are tried

    monkeypatch.setattr(start, "fit", stop)
    with pytest.raises(StoppedError):
        training.begin(Layout(1, 1, "cpu", "gloo", 1), Participants(["here"]))
    assert training.end(Interrupted()) == "nothing was started"
    assert list(tmp_path.iterdir()) == []


def test_what_is_left_is_told_with_the_command_that_resumes_it(begun: Training) -> None:
    assert begun.end(Interrupted(3, saved=True)) == (
        "saved at step 3 in run; resume it on every machine with:\npython -m ddpexp resume run"
    )


@pytest.mark.parametrize("holds", ["nothing", "an empty folder", "a run"])
def test_a_job_that_the_scheduler_refuses_leaves_what_was_there_before(begun: Training, holds: str) -> None:
    begun.end(Interrupted(0))
    shutil.rmtree("run")
    if holds == "an empty folder":
        Path("run").mkdir()
    if holds == "a run":
        begun.create()
        begun.submitted(job_id="7")
        begun.end(Interrupted(0))
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    again = replace(begun)
    again.create()
    again.end(Failed(Failure.of_refusal(RefusedError("sbatch rejected the job."))))
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
    assert Path("run").exists() == (holds != "nothing")


def test_a_job_that_was_submitted_keeps_its_folder(begun: Training) -> None:
    begun.end(Interrupted(0))
    shutil.rmtree("run")
    begun.create()
    begun.submitted(job_id="7")
    begun.end(Failed(Failure.of_refusal(RefusedError("no."))))
    assert RunDir(Path("run")).status() == "failed"


def test_a_new_folder_that_cannot_be_locked_is_removed(begun: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    begun.end(Interrupted(0))
    shutil.rmtree("run")

    def take(folder: Path, *_: object) -> lock.Lock:
        (folder / lock.NAME).touch()
        raise RefusedError("cannot be locked")

    monkeypatch.setattr(lock, "take", take)
    with pytest.raises(RefusedError):
        replace(begun).create()
    assert list(Path().iterdir()) == []


def test_a_path_of_which_only_a_part_can_be_made_is_not_left_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for run_dir in (f"a/b/{'n' * 300}", f"a/{'n' * 300}/c"):
        with refused("run.dir: cannot be made"):
            directory.create(run_dir, "mnist")
    assert list(tmp_path.iterdir()) == []
