"""Run directories that others have made and names that they have chosen.

Nothing outside is touched, no terminal is steered.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest

from ddpexp.errors import RefusedError
from ddpexp.run.directory import RunDir
from ddpexp.run.links import check_no_links
from tests.conftest import PATIENCE, Done
from tests.faults.harness import faulted
from tests.points import Recipe
from tests.refusals import command_refused

KEPT = "kept as it is\n"
CODE = r"""
EVIL = "\x1b]0;owned\x07\x1b[2Jgone\r"


class Evil(Paced):
    # Names and texts that would steer a terminal.
    def __init__(self, how="run"):
        self.how = how

    def step(self, model, batch):
        import logging
        import warnings

        loss, count, metrics = super().step(model, batch)
        if self.how == "raise" and RANK == 1:
            raise ValueError(EVIL + "\ud800" + "\u202e")
        if self.how == "refuse" and RANK == 1:
            from ddpexp.errors import RefusedError

            raise RefusedError(EVIL)
        if self.how == "exit" and RANK == 1:
            sys.exit(EVIL)
        if self.how == "warn" and RANK == 1:
            logging.getLogger("ddpexp").warning("a warning " + EVIL)
        if self.how == "print" and RANK == 0:
            print("\x1b[32mgreen\x1b[0m", flush=True)
        return loss, count, {**metrics, EVIL: metrics["accuracy"]}
"""


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What is wrong here meets the command or the ranks, not their fork server."""
    return warm_environ


@pytest.fixture
def recipe(recipe: Recipe) -> Recipe:
    with (recipe.folder / "points.py").open("a") as file:
        file.write(f"\n\n{CODE}")
    return recipe


def interrupted(recipe: Recipe) -> Path:
    """Return a run that was killed after its first checkpoint."""
    ended = faulted(
        recipe, "backward:kill:0:7", "trainer.checkpoint_every=2", "logger=tensorboard", "trainer.log_every=1"
    )
    assert ended.done.code == 1
    assert (ended.done.run / "checkpoints/step-00000004").is_dir()
    return ended.done.run


def state(folder: Path) -> dict[str, Any]:
    """Return every name below a folder, with what it leads to or holds."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in folder.rglob("*")
    }


LINKS = [
    "ranks/0.log", "ranks/1.log", "run.log", "metrics.jsonl", "lock", "result.json", "error.json", "manifest.json",
    "config.yaml",
    "overrides.yaml", "tb/{events}", "tb/events.out.tfevents.9.x",
    "checkpoints/.step-00000006.partial/model.safetensors",
    "checkpoints/.step-00000006.partial/", "checkpoints/step-00000006/", "ranks/", "tb/", "checkpoints/", "code.diff",
    "media.jsonl", "csv/", "csv/train.csv", "remote/", "remote/wandb.json", "remote/wandb.log", "wandb/",
]  # fmt: skip


@pytest.mark.fault("S16")
@pytest.mark.parametrize("name", LINKS)
def test_a_link_is_found_wherever_a_start_writes(tmp_path: Path, name: str) -> None:
    run = RunDir(tmp_path / "run")
    path = run.path / name.format(events="events.out.tfevents.1.x")
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(RefusedError) as caught:
        check_no_links(run, "run.dir=run")
    assert str(caught.value).startswith(
        f"run.dir=run: {path.relative_to(run.path)} is a symbolic link to {tmp_path}/outside, "
    )


# All in one run, one after the other: each start is refused before it changes anything.
SOME_LINKS = (
    "ranks/0.log",
    "metrics.jsonl",
    "lock",
    "config.yaml",
    "tb/{events}",
    "checkpoints/.step-00000006.partial/",
    "ranks/",
)


@pytest.mark.variants(1)
@pytest.mark.fault("S16")
@pytest.mark.parametrize("verb", ["start", "resume"])
def test_a_link_where_a_start_would_write_is_refused_and_not_followed(
    recipe: Recipe, tmp_path: Path, verb: str
) -> None:
    run = interrupted(recipe)
    outside, folder = tmp_path / "outside.txt", tmp_path / "outside"
    outside.write_text(KEPT)
    folder.mkdir()
    (folder / "mine.txt").write_text(KEPT)
    [events] = [path.name for path in (run / "tb").iterdir()]
    for name in SOME_LINKS if verb == "start" else ("ranks/0.log", "config.yaml", "checkpoints/"):
        path = run / name.format(events=events)
        aside = run.parent / "aside"
        made = None if path.parent.exists() else path.parent
        path.parent.mkdir(exist_ok=True)
        if path.exists():
            path.rename(aside)
        path.symlink_to(folder if name.endswith("/") else outside)
        before = state(run)
        done = again(recipe, run, verb)
        command_refused(done, f"{path.relative_to(run)}: symbolic link to {tmp_path}/outside")
        assert done.err.count("\n") == 1
        assert state(run) == before, name
        assert outside.read_text() == KEPT
        assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("mine.txt", KEPT)]
        path.unlink()
        if aside.exists():
            aside.rename(path)
        if made is not None:
            made.rmdir()
    assert again(recipe, run, verb).code == 0  # without the links it resumes


def again(recipe: Recipe, run: Path, verb: str) -> Done:
    if verb == "start":
        return recipe("trainer.checkpoint_every=2", "logger=tensorboard", "trainer.log_every=1", run=run)
    from tests.conftest import finish

    process, _ = recipe.ddpexp.start("resume", str(run), "--config-dir", str(recipe.folder / "conf"))
    return finish(process, run, 20)


@pytest.mark.fault("S16")
def test_a_pipe_in_the_place_of_a_file_is_refused_and_waits_for_nobody(recipe: Recipe) -> None:
    run = interrupted(recipe)
    for name in ("ranks/0.log", "metrics.jsonl", "result.json", "config.yaml", "lock"):
        kept = (run / name).read_bytes()
        (run / name).unlink()
        os.mkfifo(run / name)
        done = again(recipe, run, "start")
        assert done.err.count("\n") == 1
        command_refused(done, f"{name}: neither a file nor a folder")
        (run / name).unlink()
        (run / name).write_bytes(kept)


STEERS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e]|\r(?!\n)")


def shown(recipe: Recipe, *overrides: str) -> tuple[int, str, Path]:
    """Run on a terminal that cannot redraw a line, and return the exit code and all that it received."""
    arguments, run = recipe.words(*overrides)
    environ: Any = {**recipe.ddpexp.environ, "TERM": "dumb"}
    child = pexpect.spawn(
        sys.executable, ["-m", "ddpexp", *arguments], env=environ, cwd=str(recipe.ddpexp.folder), encoding="utf-8",
        timeout=PATIENCE,
        dimensions=(40, 200),
    )  # fmt: skip
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus, child.before or "", run


@pytest.mark.fault("S18")
@pytest.mark.parametrize(("how", "code"), [("run", 0), ("warn", 0), ("raise", 1), ("refuse", 2), ("exit", 1)])
def test_what_others_have_named_does_not_steer_the_terminal(recipe: Recipe, how: str, code: int) -> None:
    found, text, run = shown(
        recipe, "task._target_=points.Evil", f"+task.how={how}", "trainer.gpus=2", "logger=tensorboard"
    )
    assert found == code, text
    assert not STEERS.search(text), STEERS.search(text)
    assert "\\x1b]0;owned\\x07" in text  # it is shown, as text
    assert run.exists() == (how != "refuse")  # which leaves nothing
    for path in (*run.glob("run.log"), *run.glob("ranks/*"), *run.glob("*.json")):
        assert not STEERS.search(path.read_text()), path
    if how == "warn":
        assert "[rank 1] a warning \\x1b]0;owned\\x07\\x1b[2Jgone\\x0d" in text


@pytest.mark.fault("S18")
def test_colours_that_a_recipe_prints_itself_reach_the_terminal(recipe: Recipe) -> None:
    code, text, _ = shown(recipe, "task._target_=points.Evil", "+task.how=print", "trainer.gpus=2")
    assert code == 0
    assert "\x1b[32mgreen\x1b[0m" in text


@pytest.mark.fault("S18")
def test_an_argument_that_would_control_the_terminal_is_shown_as_text(recipe: Recipe) -> None:
    for word in (
        "trainer.seed=\x1b[2J",
        "optimizer=\x1b[2J",
        "+model.\x1b[2J=3",
        "--config-dir=\x1b[2J",
        "model.hidden=a\x07b",
    ):
        code, text, run = shown(recipe, word)
        assert (code, run.exists()) == (2, False), text
        assert not STEERS.search(text), (word, text)
