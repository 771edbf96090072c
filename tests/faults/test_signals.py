"""Signals at the moments that are easily forgotten."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from ddpexp.checkpoint.format import complete_checkpoints
from tests.conftest import ROOT, finish
from tests.faults.harness import Running
from tests.points import Recipe, wait_for


@pytest.mark.fault(12)
@pytest.mark.parametrize("point", ["written", "recorded", "renamed"])
def test_a_stop_while_a_checkpoint_is_written_waits_for_it(recipe: Recipe, tmp_path: Path, point: str) -> None:
    words = ("trainer.gpus=2", "trainer.epochs=100", "trainer.log_every=1", "trainer.checkpoint_every=3")
    process, run = recipe.start(*words, environ={"DDPEXP_FAULT": f"checkpoint.{point}:late={tmp_path}/here:0:2"})
    wait_for((tmp_path / "here").exists)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    done = finish(process, run, 10)
    assert (done.code, done.result()["status"]) == (143, "interrupted")
    assert time.monotonic() - begin < 5
    step = done.result()["step"]
    assert f"; saved at step {step} in " in done.err
    assert next(path.name for path in complete_checkpoints(run / "checkpoints")) == f"step-{step:08}"


@pytest.mark.fault(15)
def test_an_interrupt_of_one_rank_alone_is_no_success(recipe: Recipe) -> None:
    running = Running(recipe, "trainer.gpus=2", "trainer.epochs=100", "trainer.log_every=1")
    running.strike()
    os.kill(running.pid(1), signal.SIGINT)
    ended = running.ended()
    assert (ended.done.code, ended.done.result()["status"]) == (130, "interrupted")
    assert ended.seconds < 5


@pytest.mark.fault(11)
def test_a_stop_while_data_is_downloaded_leaves_nothing_of_it(recipe: Recipe, tmp_path: Path) -> None:
    early = tmp_path / "early"
    early.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as mirror:
        # It accepts, and never says a word; the real mirrors cannot be had everywhere.
        place = f"http://127.0.0.1:{mirror.getsockname()[1]}/"
        (early / "sitecustomize.py").write_text(
            f"import sys\nif 'ddpexp' in sys.orig_argv:\n    import ddpexp.data.mnist_files as files\n"
            f"    files.prepare.__kwdefaults__['mirrors'] = ({place!r},)\n"
        )
        process, run = recipe.ddpexp.start(
            "recipe=mnist", "data.source=download", f"data.root={tmp_path}/data",
            environ={"PYTHONPATH": f"{early}:{ROOT}", "XDG_CACHE_HOME": str(tmp_path / "cache")},
        )  # fmt: skip
        mirror.settimeout(20)
        with mirror.accept()[0]:
            begin = time.monotonic()
            process.send_signal(signal.SIGTERM)
            done = finish(process, run, 10)
    assert time.monotonic() - begin < 2
    assert done.code == 143
    assert "Traceback" not in done.err
    assert not run.exists()
    assert [path for path in [*tmp_path.glob("data/**/*"), *tmp_path.glob("cache/**/*")] if path.is_file()] == []
