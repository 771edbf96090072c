"""How a training records its end, without any worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.errors import Failure, RefusedError
from ddpexp.launch import Done, Failed, Interrupted, Layout, Outcome, Participants
from ddpexp.run import lock
from ddpexp.run.directory import RunDir
from ddpexp.run.training import Training


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


def test_what_is_left_is_told_with_the_command_that_resumes_it(begun: Training) -> None:
    assert begun.end(Interrupted(3, saved=True)) == (
        "saved at step 3 in run; resume it on every machine with:\npython -m ddpexp resume run"
    )
