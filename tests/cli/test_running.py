"""The commands to a running run, and whom they refuse."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ddpexp.checkpoint.format import is_checkpoint
from ddpexp.cli import running
from ddpexp.cli.verb import Call
from ddpexp.cli.verbs import BY_NAME
from ddpexp.errors import DdpexpError
from ddpexp.run import lock
from ddpexp.run.directory import RunDir
from ddpexp.system.files import write_json
from tests.conftest import Ddpexp, finish
from tests.points import Recipe, wait_for
from tests.refusals import refused

CODE = """\
class Naps(Sides):
    def step(self, model, batch):
        time.sleep(0.01)
        return super().step(model, batch)
"""


@pytest.fixture
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What a run is asked is tested, not how its processes start."""
    return warm_environ


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A run directory whose command is this process."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text("run: {}\n")
    write_json(run.manifest, {"format": 1})
    write_json(run.path / lock.NAME, lock.Owner.here().as_record())
    return run.path


def call(name: str, *words: str) -> Call:
    return BY_NAME[name].parse(words)


def test_each_command_does_what_it_says_to_a_run_of_two_workers(ddpexp: Ddpexp) -> None:
    recipe = Recipe(ddpexp, CODE)
    words = "task._target_=points.Naps", "trainer.gpus=2", "trainer.checkpoint_every=0", "trainer.eval_every=0"
    process, run = recipe.start(*words, "trainer.epochs=100000")
    wait_for(lambda: (run / "requests").is_dir())

    def asked(*words: str) -> dict[str, Any]:
        done = ddpexp(*words, "--json")
        assert done.code == 0, done
        answer: dict[str, Any] = json.loads(done.out)
        return answer

    profiled = asked("profile", str(run), "--steps", "3")
    assert profiled["end"] - profiled["begin"] == 3
    names = {f"rank{rank}.{what}" for rank in range(2) for what in ("trace.json.gz", "operators.txt")}
    assert {path.name for path in Path(profiled["directory"]).iterdir()} == names
    saved = asked("save", str(run))
    assert saved["step"] >= profiled["end"]
    assert is_checkpoint(Path(saved["directory"]))
    ranks = asked("stacks", str(run))["ranks"]
    assert [any(frame["function"] == "_fit" for frame in one["threads"][-1]) for one in ranks] == [True, True]
    stopped = asked("stop", str(run))
    done = finish(process, run)
    assert (done.code, stopped["status"], done.result()["step"]) == (143, "interrupted", stopped["step"])
    assert "stopped by ddpexp stop; saved at step" in done.err
    assert not (run / "requests").exists()
    again = ddpexp("stop", str(run))
    assert again.code == 2
    assert "does not run: it is interrupted" in again.err


def test_what_no_run_can_do_is_refused(place: Path, tmp_path: Path) -> None:
    for word in ("0", "1001", "x"):
        with refused(f"profile --steps={word}"):
            running.profile(call("profile", str(place), "--steps", word))
    with refused("save: RUN_DIR"):
        running.save(call("save", str(place), str(place)))
    with refused("nowhere"):
        running.stop(call("stop", str(tmp_path / "nowhere")))
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.yaml").write_text("run: {}\n")
    write_json(other / "manifest.json", {"format": 1})
    with refused("other: killed"):
        running.stacks(call("stacks", str(other)))
    with refused(f": {place.name}"):
        running.stop(call("stop", str(tmp_path)))  # the folder of both: the running one is named


def test_somebody_elses_run_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: place.stat().st_uid + 1)
    with refused("run: belongs to"):
        running.stop(call("stop", str(place)))


def test_a_run_that_takes_no_requests_or_does_not_answer_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "_FOLDER_SECONDS", 0.0)
    monkeypatch.setattr(running, "_ANSWER_SECONDS", 0.0)
    monkeypatch.setattr(running, "_NOTICE_SECONDS", -1.0)
    with pytest.raises(DdpexpError, match="takes no requests"):
        running.save(call("save", str(place)))
    (place / "requests").mkdir()
    with pytest.raises(DdpexpError, match="has not answered"):
        running.save(call("save", str(place)))
    assert "the run has not answered yet" in capsys.readouterr().err
    assert not list((place / "requests").iterdir())


def test_a_link_in_place_of_the_folder_is_not_followed(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_FOLDER_SECONDS", 0.0)
    (tmp_path / "elsewhere").mkdir()
    (place / "requests").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DdpexpError, match="takes no requests"):
        running.stop(call("stop", str(place)))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_run_that_ends_before_it_answers_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "requests").mkdir()

    def ends(_seconds: float) -> None:
        (place / lock.NAME).write_text("")

    monkeypatch.setattr(running, "_LOOK_SECONDS", -1.0)
    monkeypatch.setattr(time, "sleep", ends)
    with pytest.raises(DdpexpError, match="The run ended before it did this: it is killed"):
        running.save(call("save", str(place)))
