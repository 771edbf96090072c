"""Several loggers at once, one of them the user's own: interrupted and resumed, each records every step once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ddpexp
from ddpexp.errors import DdpexpError
from ddpexp.loggers.base import Logger, Truncatable
from ddpexp.loggers.collection import LoggerCollection
from ddpexp.loggers.remote.media import MediaFile
from ddpexp.loggers.tensorboard import TensorBoard
from tests.conftest import Ddpexp, Done
from tests.points import Recipe
from tests.refusals import command_refused, refused

CODE = """\
from pathlib import Path

from ddpexp.loggers.append_file import AppendFile, truncate_file
from ddpexp.loggers.base import Logger


class Rows(Logger):
    # Rows of step, name and value.
    def __init__(self, run_dir, file="rows.csv"):
        self.file = AppendFile(run_dir / file)

    def scalars(self, step, epoch, values):
        for name, value in values.items():
            self.file.write(f"{step},{name},{value}\\n".encode())

    def position(self):
        self.file.flush()
        return {self.file.path.name: self.file.num_bytes}

    def truncate(self, position, step):
        truncate_file(self.file.path, position, self.file.path.name, lines=True)

    def close(self):
        self.file.close()


class Counted(Logger):
    # Keeps what it needs to truncate its records, which is no length of a file; the file records its calls.
    def __init__(self, run_dir):
        self.path, self.count = run_dir / "counted.txt", 0

    def say(self, text):
        with self.path.open("a") as file:
            file.write(f"{text}\\n")

    def scalars(self, step, epoch, values):
        self.count += 1

    def position(self):
        return {"counted": {"records": self.count}}

    def truncate(self, position, step):
        self.say(f"{step} {position and position.get('counted')}")


class Simple:
    # What a logger must have, and nothing else.
    def __init__(self, run_dir):
        self.path = run_dir / "simple.txt"

    def scalars(self, step, epoch, values):
        with self.path.open("a") as file:
            file.write(f"{step}\\n")

    def text(self, name, text): ...
    def image(self, name, pixels, step): ...
    def histogram(self, name, values, step): ...
    def hyperparameters(self, values): ...
    def done(self): ...
    def close(self): ...


class Deaf:
    def __init__(self, run_dir): ...
"""
STEPS = ("trainer.gpus=2", "trainer.threads=1", "trainer.log_every=1", "trainer.checkpoint_every=2")
KILLED = {"DDPEXP_FAULT": "backward:kill:0:7"}


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What loggers write is tested, not how fork servers start."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    recipe = Recipe(Ddpexp(tmp_path_factory.mktemp("several"), environ), CODE)
    folder = recipe.folder / "conf/logger"
    folder.mkdir()
    for name in ("counted", "simple", "deaf"):
        (folder / f"{name}.yaml").write_text(f"{name}:\n  _target_: points.{name.title()}\n")
    (folder / "rows.yaml").write_text("rows:\n  _target_: points.Rows\n  file: rows.csv\n")
    (folder / "flat.yaml").write_text("_target_: points.Rows\n")
    return recipe


def rows(run: Path, file: str = "rows.csv") -> list[tuple[int, str]]:
    parts = [line.split(",") for line in (run / file).read_text().splitlines()]
    return [(int(step), name) for step, name, _ in parts]


def scalars(run: Path) -> list[tuple[int, str]]:
    """Return the step and name of each scalar in TensorBoard's files, as its own reader finds them."""
    found = []
    for path in sorted((run / "tb").iterdir()):
        board = EventAccumulator(str(path), size_guidance={"scalars": 0})
        board.Reload()
        found += [(event.step, name) for name in board.Tags()["scalars"] for event in board.Scalars(name)]
    return sorted(found)


def lines(done: Done) -> list[tuple[int, str]]:
    return [(record["step"], name) for record in done.metrics() for name in record if "/" in name]


def test_interrupted_and_resumed_each_of_two_loggers_has_every_step_once(recipe: Recipe) -> None:
    overrides = (*STEPS, "logger=[tensorboard,rows]", "logger.rows.file=mine.csv")
    killed = recipe(*overrides, environ=KILLED)
    assert killed.code == 1
    assert max(step for step, _ in rows(killed.run, "mine.csv")) > 6 - 2
    done = recipe(*overrides, run=killed.run)
    assert done.code == 0, done.err
    assert "resumed after step" in done.out
    expected = lines(done)
    assert [step for step, name in expected if name == "train/loss"] == list(range(1, 9))
    assert rows(done.run, "mine.csv") == expected
    assert scalars(done.run) == sorted(expected)


def test_a_logger_that_a_start_leaves_out_is_truncated_when_it_is_back(recipe: Recipe) -> None:
    overrides = (*STEPS, "trainer.epochs=3")
    killed = recipe(*overrides, "logger=[tensorboard,rows]", environ=KILLED)
    again = recipe(*overrides, "logger=none", run=killed.run, environ={"DDPEXP_FAULT": "backward:kill:0:3"})
    assert (killed.code, again.code) == (1, 1)
    done = recipe(*overrides, "logger=[tensorboard,rows]", run=killed.run)
    assert done.code == 0, done.err
    steps = [step for step, name in rows(done.run) if name == "train/loss"]
    assert steps == sorted(set(steps))
    assert steps[-1] == 12
    assert scalars(done.run) == sorted(rows(done.run))


def test_what_a_logger_needs_to_truncate_its_records_may_be_anything_that_json_holds(recipe: Recipe) -> None:
    killed = recipe(*STEPS, "logger=counted", environ=KILLED)
    [*_, newest] = sorted((killed.run / "checkpoints").glob("step-*"))
    step = int(newest.name[-8:])
    stored = json.loads((newest / "checkpoint.json").read_text())["records"]
    assert stored["counted"]["records"] >= step
    assert set(stored) == {"metrics.jsonl", "counted"}
    done = recipe(*STEPS, "logger=counted", run=killed.run)
    assert done.code == 0, done.err
    assert (done.run / "counted.txt").read_text().splitlines() == ["0 None", f"{step} {stored['counted']}"]


def test_a_logger_without_these_methods_is_not_called(recipe: Recipe) -> None:
    done = recipe(*STEPS, "logger=[simple]", "trainer.eval_every=0")
    assert done.code == 0, done.err
    assert (done.run / "simple.txt").read_text().split() == [str(step) for step in range(1, 9)]
    assert not (done.run / "tb").exists()


def test_a_switched_off_logger_records_nothing(recipe: Recipe) -> None:
    done = recipe("trainer.max_steps=1", "logger=[simple,rows]", "logger.rows=null", "~logger.simple")
    assert done.code == 0, done.err
    assert not {"simple.txt", "rows.csv", "tb"} & {path.name for path in done.run.iterdir()}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["logger=[rows,tb]"], "logger=tb: logger=tensorboard?"),
        (["logger=[tensorboard,rwos]"], "logger=rwos: logger=rows?"),
        (["logger=rows", "logger.rows.fil=x"], "logger.rows.fil: logger.rows.file?"),
        (["logger=rows", "logger.rows=csv"], "logger.rows=csv: _target_"),
        (["logger=flat"], "logger._target_=points.Rows: several"),
        (["logger=rows", "logger.rows._target_=os.system"], "logger.rows._target_=os.system"),
    ],
)
def test_what_is_no_choice_of_loggers_is_refused(recipe: Recipe, overrides: list[str], expected: str) -> None:
    words = [f"--config-dir={recipe.folder}/conf", "recipe=points", *overrides]
    with refused(expected):
        ddpexp.compose(words)


def test_an_object_that_is_no_logger_is_refused(recipe: Recipe) -> None:
    done = recipe("logger=deaf", "trainer.gpus=1")
    command_refused(done, "logger.deaf._target_=points.Deaf: method scalars")


def test_only_loggers_that_can_be_truncated_are_called() -> None:
    assert not isinstance(Logger(), Truncatable)
    both = LoggerCollection([Logger(), Logger()])
    assert both.position() == {}
    both.truncate(None, 0)


class Heard(Logger):
    """Keeps the names and texts that it is called with."""

    def __init__(self) -> None:
        self.texts: list[Any] = []

    def scalars(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        self.texts += values

    def text(self, name: str, text: str) -> None:
        self.texts += [name, text]

    def image(self, name: str, pixels: torch.Tensor, step: int) -> None:
        self.texts.append(name)

    def histogram(self, name: str, values: torch.Tensor, step: int) -> None:
        self.texts.append(name)

    def hyperparameters(self, values: Mapping[str, bool | float | str]) -> None:
        self.texts += [*values, *values.values()]


def test_every_logger_gets_names_and_texts_with_their_secrets_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "q5zk-planted")
    heard, one = Heard(), torch.zeros(1)
    logger = LoggerCollection([heard])
    logger.scalars(1, 0.5, {"a/q5zk-planted": 1.0})
    logger.text("b q5zk-planted", "c q5zk-planted")
    logger.image("d q5zk-planted", one[:, None], 1)
    logger.histogram("e q5zk-planted", one, 1)
    logger.hyperparameters({"f q5zk-planted": "g q5zk-planted", "h": 1.5})
    names = [f"{letter} ${{MY_TOKEN}}" for letter in "bcdefg"]
    assert heard.texts == ["a/${MY_TOKEN}", *names[:-1], "h", names[-1], 1.5]
    assert {type(text) for text in heard.texts} == {str, float}, "protocol buffers and YAML take plain strings"


class Shown(Logger):
    def __init__(self) -> None:
        self.images: list[torch.Tensor] = []

    def image(self, name: str, pixels: torch.Tensor, step: int) -> None:
        self.images.append(pixels)


def test_every_logger_gets_pictures_of_every_kind_in_one_form(tmp_path: Path) -> None:
    shown = Shown()
    with closing(LoggerCollection([shown, TensorBoard(tmp_path), MediaFile(tmp_path)])) as logger:
        rgb = np.random.default_rng(0).integers(0, 256, (5, 6, 3), dtype=np.uint8)
        first = torch.from_numpy(rgb).permute(2, 0, 1)
        for picture in (
            rgb,
            Image.fromarray(rgb),
            first,
            first / 255,
            first.bfloat16() / 255,
            rgb[:, :, :1],
            rgb[:, :, 0],
        ):
            logger.image("a", picture, 1)
        assert {(image.shape, image.dtype, image.is_contiguous()) for image in shown.images} == {
            ((5, 6, 3), torch.uint8, True)
        }
        for image in shown.images[:5]:
            assert (image.int() - torch.from_numpy(rgb).int()).abs().max() <= 1  # the digits of bfloat16
        assert torch.equal(shown.images[5], shown.images[6])
        with refused("logger.image('a'): float32 of shape (5, 6, 3) with values from -1", DdpexpError):
            logger.image("a", first / 128 - 1, 1)
