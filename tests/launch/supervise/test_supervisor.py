"""A rank that fails and a run that is stopped: one message, the right exit code, nothing left."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pexpect
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import OWN_SERVER, PATIENCE, Ddpexp, Done, finish
from tests.points import ITEMS, Recipe, session, wait_for

CODE = """\
from ddpexp.errors import RefusedError

counts = {"train": 0, "eval": 0}


class Act(Sides):
    # Does `how` in rank `rank` at training step `step`, or in the evaluation after it.
    def __init__(self, how, rank=1, step=3, when="train"):
        self.how, self.rank, self.at, self.when = how, rank, step, when

    def step(self, model, batch):
        kind = "train" if model.training else "eval"
        counts[kind] += 1
        if RANK == self.rank and kind == self.when and (kind == "eval" or counts[kind] == self.at):
            WAYS[self.how]()
        return super().step(model, batch)


def raises():
    raise ValueError("no luck")


def hangs():
    # What a call into C that holds on, with every polite signal ignored, looks like from outside.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("hangs", "w").close()
    time.sleep(600)


def refuses():
    raise RefusedError("data.train=96 is not to my taste: use another number.")


WAYS = {
    "raise": raises,
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "server": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "os._exit(7)": lambda: os._exit(7),
    "os._exit(0)": lambda: os._exit(0),
    "sys.exit(7)": lambda: sys.exit(7),
    "sys.exit(0)": lambda: sys.exit(0),
    "hang": hangs,
    "refuse": refuses,
}


class Breaks(Net):
    def __init__(self, **options):
        if RANK == 1:
            raise ValueError("no luck")
        super().__init__(**options)


def load_broken(**options):
    if RANK == 1:
        raise ValueError("no luck")
    return load(**options)


class Bad(Items):
    def __getitem__(self, index):
        if RANK == 1:
            raise ValueError("no luck")
        return super().__getitem__(index)


def load_bad(train=96, test=33):
    return Splits(Bad(train, 0), {"eval": Items(test, 1)})


class Slow(Sides):
    # Twenty milliseconds a step, with a mark for every rank that has begun to train or to evaluate.
    def __init__(self, folder):
        self.folder, self.steps = folder, 0

    def step(self, model, batch):
        self.steps += model.training
        if model.training or self.steps > 1:  # after its first step a task is checked for returning sums
            open(f"{self.folder}/{'train' if model.training else 'eval'}{RANK}", "w").close()
        time.sleep(0.02)
        return super().step(model, batch)
"""


@pytest.fixture(scope="module")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """The environment in which commands are forks, where the test is not about the start of a server."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("supervise"), environ), CODE)


def act(recipe: Recipe, how: str, *overrides: str) -> tuple[Done, dict[str, Any]]:
    done = recipe("task._target_=points.Act", f"+task.how='{how}'", "trainer.gpus=2", *overrides)
    return done, failed(done)


def failed(done: Done) -> dict[str, Any]:
    """Check what every failed run leaves, and return its error."""
    error: dict[str, Any] = json.loads((done.run / "error.json").read_text())
    result = done.result()
    assert (result["status"], result["world_size"]) == ("failed", 2)
    assert error["host"] == platform.node()
    assert done.err.count("failed (") == 1
    assert f"ddpexp: rank {error['rank']} on {error['host']} failed ({error['phase']}" in done.err
    return error


@pytest.mark.variants(3)
@pytest.mark.fault(1)
@pytest.mark.fault(1, 2, 61)
@pytest.mark.parametrize(
    ("overrides", "phase", "step"),
    [
        ("model._target_=points.Breaks", "build", None),
        ("data._target_=points.load_broken", "build", None),
        ("data._target_=points.load_bad", "data", None),
        ("data._target_=points.load_bad data.num_workers=1", "data", None),
        ("task._target_=points.Act +task.how=raise", "train", 2),
        ("task._target_=points.Act +task.how=raise +task.when=eval", "evaluate", 4),
    ],
    ids=["model", "data", "item", "loader", "step", "eval"],
)
def test_an_error_in_one_rank_is_shown_once_with_its_rank(
    recipe: Recipe, overrides: str, phase: str, step: int | None
) -> None:
    done = recipe(*overrides.split(), "trainer.gpus=2")
    error = failed(done)
    assert done.code == 1
    assert (error["rank"], error["kind"], error["phase"], error["signal"]) == (1, "ValueError", phase, None)
    assert "no luck" in error["message"]
    assert error["step"] == step  # done before
    assert 'points.py", line ' in error["traceback"]
    shown = done.out + done.err
    assert shown.count(error["traceback"].rstrip()) == 1
    assert len(re.findall(r"^Traceback", shown, re.MULTILINE)) == len(
        re.findall(r"^Traceback", error["traceback"], re.MULTILINE)
    )
    assert done.err.endswith("(rank 0 terminated as a consequence)\n")
    assert "no luck" in (done.run / "ranks/1.log").read_text()


@pytest.mark.variants(3)
@pytest.mark.fault(3, 4, 18, 19)
@pytest.mark.parametrize(
    ("rank", "how", "code", "kind", "signum", "message"),
    [
        (0, "SIGKILL", 1, "SIGKILL", 9, "killed by SIGKILL"),
        (1, "SIGKILL", 1, "SIGKILL", 9, "killed by SIGKILL"),
        (0, "SIGSEGV", 1, "SIGSEGV", 11, "killed by SIGSEGV"),
        (1, "SIGSEGV", 1, "SIGSEGV", 11, "killed by SIGSEGV"),
        (1, "os._exit(7)", 7, "SystemExit", None, "the process ended with exit code 7 before its work was done"),
        (1, "os._exit(0)", 1, "SystemExit", None, "the process ended with exit code 0 before its work was done"),
        (1, "sys.exit(7)", 7, "SystemExit", None, "the recipe ended the process: sys.exit(7)"),
        (0, "sys.exit(0)", 1, "SystemExit", None, "the recipe ended the process: sys.exit(0)"),
    ],
)
def test_a_death_of_one_rank_ends_the_run_with_its_cause(
    recipe: Recipe, rank: int, how: str, code: int, kind: str, signum: int | None, message: str
) -> None:
    done, error = act(recipe, how, f"+task.rank={rank}")
    assert done.code == code
    assert (error["rank"], error["kind"], error["signal"], error["message"]) == (rank, kind, signum, message)
    shown = done.out + done.err
    assert shown.count("recipe  points") == 1  # rank zero's words are not repeated
    assert shown.count("Segmentation fault") == (how == "SIGSEGV")  # faulthandler's
    assert done.err.splitlines()[-1].endswith(f"(rank {1 - rank} terminated as a consequence)")


def test_the_end_of_the_fork_server_is_in_the_log_of_every_rank(recipe: Recipe) -> None:
    done = recipe("task._target_=points.Act", "+task.how=server", "trainer.gpus=2", environ=OWN_SERVER)
    error = failed(done)
    assert (done.code, error["kind"], error["signal"]) == (1, "ServerLost", 9)
    for log in ("ranks/0.log", "ranks/1.log"):
        assert (done.run / log).read_text().endswith(f"ServerLost: {error['message']}\n")


def test_what_one_worker_refuses_is_one_sentence_and_2(recipe: Recipe) -> None:
    done = recipe("task._target_=points.Act", "+task.how=refuse", "trainer.gpus=2")
    assert done.code == 2
    assert done.err == "ddpexp: data.train=96 is not to my taste: use another number.\n"


def slow(
    recipe: Recipe, folder: Path, *overrides: str, environ: dict[str, str] | None = None
) -> tuple[subprocess.Popen[str], Path]:
    """Start a run that lasts until it is ended, and may take its time then."""
    task = ("task._target_=points.Slow", f"+task.folder={folder}", "trainer.epochs=50000", "trainer.gpus=2", GRACE)
    return recipe.start(
        *task, "trainer.log_every=1", "trainer.eval_every=10", "logger=tensorboard", *overrides, environ=environ
    )


GRACE = "trainer.grace_seconds=600"
"""What ends has not waited for the time of grace."""


def begun(folder: Path, kind: str) -> bool:
    return len(list(folder.glob(f"{kind}*"))) == 2


def recorded(run: Path) -> bool:
    return (run / "metrics.jsonl").exists() and len((run / "metrics.jsonl").read_text().splitlines()) >= 3


@pytest.mark.variants(3)
@pytest.mark.fault(8, 10, 16)
@pytest.mark.parametrize(
    ("signum", "group", "moment"),
    [
        (signal.SIGINT, False, "train"),
        (signal.SIGTERM, True, "train"),
        (signal.SIGHUP, False, "train"),
        (signal.SIGTERM, False, "eval"),
        (signal.SIGINT, True, "loader"),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else None,
)
def test_a_signal_ends_the_run_with_everything_recorded(
    recipe: Recipe, tmp_path: Path, signum: signal.Signals, group: bool, moment: str
) -> None:
    process, run = slow(recipe, tmp_path, *(ITEMS if moment == "loader" else ()))
    wait_for(lambda: recorded(run) and begun(tmp_path, "eval" if moment == "eval" else "train"))
    if group:
        os.killpg(process.pid, signum)
    else:
        process.send_signal(signum)
    wait_for(lambda: not session(process.pid))
    done = finish(process, run)
    assert done.code == 128 + signum
    stopped(done, signum)


def stopped(done: Done, signum: signal.Signals) -> None:
    """Check what every stopped run leaves."""
    assert "Traceback" not in done.out + done.err
    assert done.result()["status"] == "interrupted"
    assert f"interrupted by {signum.name}" in done.out + done.err
    assert not (done.run / "error.json").exists()
    board = EventAccumulator(str(done.run / "tb"), size_guidance={"scalars": 0})
    board.Reload()
    written = [record for record in done.metrics() if "train/loss" in record]
    assert [event.step for event in board.Scalars("train/loss")] == [record["step"] for record in written]
    assert [record["step"] for record in written] == list(range(1, len(written) + 1))


@pytest.mark.variants(1)
@pytest.mark.fault(8)
@pytest.mark.parametrize("items", [(), ITEMS], ids=["", "with loaders"])
@pytest.mark.parametrize("last", [True, False], ids=["the command last", "the command first"])
def test_a_scheduler_that_signals_every_process_at_once_ends_the_run_like_one_signal(
    recipe: Recipe, tmp_path: Path, last: bool, items: tuple[str, ...]
) -> None:
    process, run = slow(recipe, tmp_path, *items, environ=OWN_SERVER)
    wait_for(lambda: recorded(run) and begun(tmp_path, "train"))
    others = set(session(process.pid)) - {process.pid}  # the workers, those of their loaders, and the server
    for pid in [*others, process.pid] if last else [process.pid, *others]:
        with suppress(ProcessLookupError):  # ended by the command meanwhile
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.02 if last else 0)
    wait_for(lambda: not session(process.pid))
    done = finish(process, run)
    assert done.code == 128 + signal.SIGTERM
    stopped(done, signal.SIGTERM)
    assert f"; saved at step {done.result()['step']} in " in done.err


@pytest.mark.fault(11)
def test_a_signal_while_the_server_imports_ends_the_command(recipe: Recipe, tmp_path: Path) -> None:
    process, run = slow(recipe, tmp_path, environ=OWN_SERVER)
    wait_for(lambda: len(session(process.pid)) == 2)
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: not session(process.pid))
    done = finish(process, run)
    assert done.code in (128 + signal.SIGTERM, -signal.SIGTERM)  # the same in a shell
    assert "Traceback" not in done.err


@pytest.mark.fault(11)
def test_a_signal_while_the_workers_wait_for_the_imports_ends_the_command(recipe: Recipe, tmp_path: Path) -> None:
    process, run = slow(recipe, tmp_path, environ=OWN_SERVER)
    wait_for((run / "ranks/1.log").exists)  # the command requests workers, the server has still to import
    process.send_signal(signal.SIGINT)
    wait_for(lambda: not session(process.pid))
    done = finish(process, run)
    assert done.code == 128 + signal.SIGINT
    assert done.result()["status"] == "interrupted"
    assert "Traceback" not in done.err


@pytest.mark.fault(14)
def test_ctrl_c_in_a_terminal_ends_the_run_cleanly(recipe: Recipe, tmp_path: Path) -> None:
    overrides, run = recipe.words(
        "task._target_=points.Slow", f"+task.folder={tmp_path}", "trainer.epochs=50000", "trainer.gpus=2", GRACE
    )
    environ: Any = recipe.ddpexp.environ
    child = pexpect.spawn(
        sys.executable,
        ["-m", "ddpexp", *overrides, "trainer.log_every=1", "logger=tensorboard"],
        env=environ,
        encoding="utf-8",
    )
    wait_for(lambda: recorded(run))
    child.sendintr()
    child.expect(pexpect.EOF, timeout=PATIENCE)
    child.close()
    done = Done(child.exitstatus, child.before or "", "", run)
    assert done.code == 128 + signal.SIGINT
    stopped(done, signal.SIGINT)


@pytest.mark.fault(13, 17)
def test_a_second_signal_after_two_seconds_kills_a_rank_that_ignores_the_first(recipe: Recipe) -> None:
    process, run = recipe.start("task._target_=points.Act", "+task.how=hang", "trainer.gpus=2", GRACE)
    wait_for((recipe.ddpexp.folder / "hangs").exists)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)  # the same one, forwarded twice as some shells and schedulers do
    time.sleep(4)
    assert session(process.pid)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: not session(process.pid))
    done = finish(process, run)
    assert (done.code, done.result()["status"]) == (128 + signal.SIGINT, "interrupted")
