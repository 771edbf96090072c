"""Runs whose checkpoints or records are damaged, moved or cannot be written.

Nothing that was trained is lost in silence.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpexp.checkpoint.format import complete_checkpoints, newest_intact, scan
from tests.conftest import Ddpexp, Done, finish
from tests.points import Recipe, wait_for

CODE = """\
import threading


class Slow(Sides):
    def step(self, model, batch):
        time.sleep(0.02 if model.training else 0)
        return super().step(model, batch)


class OutOfThreads(Sides):
    # From one step on, on one rank, no thread can be started, or the one that writes has no memory.
    def __init__(self, rank, step=5, memory=False):
        self.rank, self.left, self.memory = rank, step, memory

    def step(self, model, batch):
        if model.training:
            self.left -= 1
            if self.left == 0 and RANK == self.rank:
                if self.memory:
                    from ddpexp.checkpoint import writer

                    writer._write_at = no_memory
                else:
                    threading.Thread.start = no_thread
        return super().step(model, batch)


def no_thread(thread):
    raise RuntimeError("can't start new thread")


def no_memory(*words):
    raise MemoryError
"""
SHORT = ("trainer.checkpoint_every=2", "trainer.eval_every=0", "trainer.log_every=1")


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What checkpoints keep is tested, not how fork servers start."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("lost"), environ), CODE)


@pytest.fixture(scope="module")
def finished(recipe: Recipe) -> Done:
    """A run of eight steps, which tests copy."""
    done = recipe(*SHORT, "trainer.gpus=2", "trainer.keep_last=2")
    assert done.code == 0, done.err
    return done


@pytest.fixture
def run(finished: Done, tmp_path: Path) -> Path:
    return shutil.copytree(finished.run, tmp_path / "run")


def resumed(recipe: Recipe, run: Path) -> Done:
    process, _ = recipe.ddpexp.start("resume", str(run), "--config-dir", str(recipe.folder / "conf"))
    return finish(process, run)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


HARMS: dict[str, Callable[[Path], None]] = {
    "no manifest": lambda folder: (folder / "checkpoint.json").unlink(),
    "a bit of the weights": lambda folder: flip(folder / "model.safetensors"),
    "bytes appended": lambda folder: append(folder / "model.safetensors"),
    "a bit of the manifest": lambda folder: flip(folder / "checkpoint.json"),
}


@pytest.mark.variants(2)
@pytest.mark.parametrize("harm", HARMS)
def test_the_final_weights_of_a_finished_run_that_are_damaged_are_trained_again(
    recipe: Recipe, finished: Done, run: Path, harm: str
) -> None:
    HARMS[harm](run / "checkpoints/step-00000008")
    evaluated = recipe.ddpexp("evaluate", str(run), "--config-dir", str(recipe.folder / "conf"))
    assert evaluated.code == 0, evaluated.err
    assert "step-00000008 is damaged and not used: " in evaluated.err
    assert "the weights are of step 6; resume the run" in evaluated.err
    done = resumed(recipe, run)
    assert done.code == 0, done.err
    assert "the run was finished at step 8, but its final checkpoint cannot be used (" in done.out
    assert "resumed after step 6 of 8" in done.out
    assert done.result()["weights_sha256"] == finished.result()["weights_sha256"]
    assert [one.problem() for one in scan(run / "checkpoints").complete] == [None, None]
    assert [one.step for one in scan(run / "checkpoints").complete] == [8, 6]
    assert (run / "checkpoints/step-00000008.damaged").is_dir()
    again = resumed(recipe, run)
    assert (again.code, again.out.count("nothing to do")) == (0, 1)
    assert [line["step"] for line in done.metrics()] == list(range(1, 9))


def test_a_damaged_newest_checkpoint_without_its_result_is_replaced(recipe: Recipe, finished: Done, run: Path) -> None:
    (run / "result.json").unlink()
    (run / "checkpoints/step-00000008/checkpoint.json").unlink()
    done = resumed(recipe, run)
    assert done.code == 0, done.err
    assert done.result()["weights_sha256"] == finished.result()["weights_sha256"]
    assert complete_checkpoints(run / "checkpoints")[0].name == "step-00000008"


def test_a_finished_run_whose_checkpoints_were_removed_stays_finished(recipe: Recipe, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    done = resumed(recipe, run)
    assert (done.code, done.out.count("nothing to do")) == (0, 1)


def test_a_torn_line_of_the_records_is_cut_off(recipe: Recipe, finished: Done, run: Path) -> None:
    (run / "result.json").unlink()
    shutil.rmtree(run / "checkpoints/step-00000008")
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]) + lines[4][:20])
    done = resumed(recipe, run)
    assert done.code == 0, done.err
    assert "metrics.jsonl is shorter than at the checkpoint: some of its records are lost" in done.out
    assert [line["step"] for line in done.metrics()] == [1, 2, 3, 4, 7, 8]
    assert done.result()["weights_sha256"] == finished.result()["weights_sha256"]


@pytest.mark.parametrize("removed", [False, True], ids=["moved", "removed"])
def test_a_run_directory_that_is_moved_ends_the_run_with_one_sentence(
    recipe: Recipe, tmp_path: Path, removed: bool
) -> None:
    words = (
        "task._target_=points.Slow",
        "trainer.epochs=null",
        "trainer.max_steps=1000",
        "trainer.checkpoint_every=5",
        "trainer.gpus=2",
    )
    process, run = recipe.start(*words, "trainer.log_every=5", "trainer.eval_every=0", run=tmp_path / "run")
    wait_for(lambda: len(scan(run / "checkpoints").complete) > 0)
    if removed:
        os.rename(run, tmp_path / "gone")
        shutil.rmtree(tmp_path / "gone")
    else:
        os.rename(run, tmp_path / "elsewhere")
    done = finish(process, run)
    assert done.code == 1, (done.out, done.err)
    said = [line for line in done.err.splitlines() if line.startswith("ddpexp:")]
    assert len(said) == 1, done.err
    assert re.search(
        r"^ddpexp: rank 0 on \S+ failed \(.*\): MovedError: the run directory .*run was moved or removed while", said[0]
    )
    assert "Traceback" not in done.err
    assert not run.exists()
    if not removed:  # what was written before resumes from where it is now
        there = tmp_path / "elsewhere"
        last = int(complete_checkpoints(there / "checkpoints")[0].name[5:])
        process, _ = recipe.ddpexp.start(
            "resume", str(there), "--config-dir", str(recipe.folder / "conf"), f"trainer.max_steps={last + 1}"
        )
        assert f"resumed after step {last} of {last + 1}" in finish(process, there).out


@pytest.mark.parametrize(
    ("rank", "memory"), [(0, False), (1, False), (1, True), pytest.param(0, True, marks=pytest.mark.slow)]
)
def test_an_error_of_the_thread_that_writes_ends_the_run_with_its_cause(
    recipe: Recipe, rank: int, memory: bool
) -> None:
    done = recipe(
        *SHORT,
        "task._target_=points.OutOfThreads",
        f"+task.rank={rank}",
        f"+task.memory={str(memory).lower()}",
        "trainer.gpus=2",
    )
    assert done.code == 1, (done.out, done.err)
    cause = "MemoryError" if memory else "RuntimeError: can't start new thread"
    place = re.escape(f"{done.run}/checkpoints")
    assert re.search(
        rf"CheckpointError: the checkpoint of step [468] could not be written in {place}: {cause}", done.err
    )
    assert "Traceback" not in done.err
    assert json.loads((done.run / "error.json").read_text())["kind"] == "CheckpointError"
    assert all(one.problem() is None for one in scan(done.run / "checkpoints").complete)


@pytest.mark.slow
def test_of_two_hundred_damages_none_is_accepted_with_another_value(
    recipe: Recipe, finished: Done, run: Path, tmp_path: Path
) -> None:
    """One bit or byte changed, added or removed, spread over all files of a real checkpoint.

    Every tenth through the command.
    """
    chance = random.Random(0)
    newest = run / "checkpoints/step-00000008"
    names = sorted(path.name for path in newest.iterdir())
    (run / "result.json").unlink()
    for number in range(200):
        folder = shutil.copytree(run, tmp_path / "damaged")
        path = folder / "checkpoints/step-00000008" / names[number % len(names)]
        data = bytearray(path.read_bytes())
        place = chance.randrange(len(data))
        kind = chance.choice(("bit", "byte", "added", "removed"))
        if kind == "bit":
            data[place] ^= 1 << chance.randrange(8)
        elif kind == "byte":
            data[place] = (data[place] + chance.randrange(1, 256)) % 256
        elif kind == "added":
            data.insert(place, chance.randrange(256))
        else:
            del data[place]
        path.write_bytes(data)
        chosen, damaged = newest_intact(folder / "checkpoints")
        assert chosen is not None
        assert (chosen.step, [one.step for one in damaged]) == (6, [8]), (number, path.name, kind, place)
        if number % 10 == 0:
            done = resumed(recipe, folder)
            assert done.code == 0, done.err
            assert "resumed after step 6 of 8" in done.out
            assert done.result()["weights_sha256"] == finished.result()["weights_sha256"]
        shutil.rmtree(folder)
