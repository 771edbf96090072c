"""What errors say, and whom it reaches: long and broken texts, readers that leave, terminals that nobody reads."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PATIENCE, SMALL, Ddpexp, finish
from tests.faults.harness import trained
from tests.points import Recipe, wait_for

CODE = r"""
class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__("no luck")
        self.kept = lambda: (one, two)

    def __reduce__(self):
        raise TypeError("cannot be pickled")


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("nothing to say")

    __repr__ = __str__


def chain():
    try:
        try:
            raise KeyError("the first cause")
        except KeyError as error:
            raise ValueError("x" * (50 << 20)) from error
    except ValueError as error:
        raise RuntimeError("the last one") from error


def group():
    if sys.version_info < (3, 11):
        raise RuntimeError("several (ValueError: one) (TypeError: two)")
    raise ExceptionGroup("several", [ValueError("one"), TypeError("two")])


def deep(level=0):
    try:
        if level < 300:
            deep(level + 1)
        raise ValueError(f"level {level} " + "y" * 2000)
    except ValueError as error:
        raise ValueError(f"above {level}") from error


def throw(error):
    raise error


WAYS = {
    "huge": lambda: throw(ValueError("begin" + "x" * (50 << 20) + "finish")),
    "unpicklable": lambda: throw(Unpicklable(1, two=2)),
    "mute": lambda: throw(Mute()),
    "surrogates": lambda: throw(ValueError("\ud800 and \udfff and \x00")),
    "exit": lambda: sys.exit("begin" + "x" * (50 << 20) + "finish"),
    "mute exit": lambda: sys.exit(Mute()),
    "chain": chain,
    "group": group,
    "deep": deep,
}


class Talks(Paced):
    def step(self, model, batch):
        print("a kilobyte a step " * 60)
        return super().step(model, batch)


class Acts(Paced):
    def __init__(self, how):
        self.how = how

    def step(self, model, batch):
        if RANK == 1:
            WAYS[self.how]()
        return super().step(model, batch)
"""


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What is printed is tested, not how fork servers start."""
    return warm_environ


@pytest.fixture
def recipe(recipe: Recipe) -> Recipe:
    with (recipe.folder / "points.py").open("a") as file:
        file.write(f"\n\n{CODE}")
    return recipe


@pytest.mark.variants(1)
@pytest.mark.fault(21)
@pytest.mark.parametrize(
    ("how", "kind", "says", "traces"),
    [
        (
            "huge",
            "ValueError",
            r"begin.*\.\.\. 52,420,\d\d\d bytes are left out here \.\.\..*finish",
            r"ValueError: begin",
        ),
        ("unpicklable", "Unpicklable", "no luck", "points.Unpicklable: no luck"),
        ("mute", "Mute", "its text is not available: __str__ of Mute raised RuntimeError", "Mute: "),
        ("surrogates", "ValueError", r"\\ud800 and \\udfff and \\x00", r"ValueError: \\ud800"),
        ("exit", "SystemExit", r"sys\.exit\('begin.*bytes are left out here.*finish'\)", None),
        pytest.param("mute exit", "SystemExit", r"sys\.exit\(a Mute\)", None, marks=pytest.mark.slow),
        (
            "chain",
            "RuntimeError",
            "the last one",
            r"KeyError: 'the first cause'.*direct cause.*bytes are left out.*the last one",
        ),
        ("group", "ExceptionGroup|RuntimeError", "several", r"ValueError: one.*TypeError: two"),
        pytest.param(
            "deep",
            "ValueError",
            "above 0",
            r"level 300 y.*bytes are left out here.*ValueError: above 0",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_error_of_any_kind_is_reported_in_short(
    recipe: Recipe, how: str, kind: str, says: str, traces: str | None
) -> None:
    done = recipe("task._target_=points.Acts", f"+task.how={how}", "trainer.gpus=2")
    assert done.code == 1
    error = json.loads((done.run / "error.json").read_text())
    assert re.fullmatch(kind, error["kind"])
    assert re.search(says, error["message"], re.DOTALL), error["message"][:200]
    assert len(error["message"].encode()) <= (8 << 10) + 100
    assert error["rank"] == 1
    if traces:
        assert re.search(traces, error["traceback"], re.DOTALL), error["traceback"][-3000:]
        assert "points.py" in error["traceback"]
    assert len((error["traceback"] or "").encode()) <= (64 << 10) + 100
    assert (done.run / "error.json").stat().st_size < 100 << 10
    assert len(done.err) < 100 << 10
    assert re.search(f"ddpexp: rank 1 on .* failed .*{says}", done.err, re.DOTALL)
    assert len((done.run / "ranks/1.log").read_bytes()) < 100 << 10


def opened(ddpexp: Ddpexp, redirection: str, *overrides: str) -> tuple[int, str, str]:
    """Run a shell line; return the command's exit code, and what was on the shell's own output and errors."""
    script = f"set -o pipefail; {sys.executable} -m ddpexp {' '.join(overrides)} {redirection}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=ddpexp.folder, env=ddpexp.environ, stdin=subprocess.DEVNULL, capture_output=True,
        text=True,
        timeout=PATIENCE,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.variants(1)
@pytest.mark.fault(22)
@pytest.mark.parametrize(
    "redirection",
    ["2>&1 | head -1", ">&-", "<&- >&- 2>&-", "> /dev/full 2>&1"],
)
def test_output_that_goes_nowhere_does_not_end_the_run(ddpexp: Ddpexp, redirection: str) -> None:
    code, _, err = opened(ddpexp, redirection, *SMALL, "trainer.gpus=2", "run.dir=run", "logger=tensorboard")
    assert (code, err) == (0, "")
    assert json.loads((ddpexp.folder / "run/result.json").read_text())["status"] == "done"
    lines = (ddpexp.folder / "run/run.log").read_text().splitlines()
    assert lines[-1].split()[2] == "done"
    for line in (ddpexp.folder / "run/metrics.jsonl").read_text().splitlines():
        json.loads(line)
    # What was closed is not taken for something else: nothing but the worker's own words is in its log.
    assert len((ddpexp.folder / "run/ranks/0.log").read_text().splitlines()) < 20
    code, _, err = opened(ddpexp, redirection, *SMALL, "run.dir=run")  # it is finished, and nobody reads its output
    assert (code, err) == (0, "")


@pytest.mark.fault(22)
@pytest.mark.parametrize("redirection", ["2>&-", "2> /dev/full", "2>&1 | head -0"])
def test_an_error_that_nobody_reads_keeps_its_exit_code(ddpexp: Ddpexp, redirection: str) -> None:
    assert opened(ddpexp, redirection, *SMALL, "trainer.gpu=2")[0] == 2


class Unread:
    """A terminal or a pipe whose other end nobody reads."""

    def __init__(self, kind: str) -> None:
        if kind == "terminal":
            self.reading, self.writing = pty.openpty()
        else:
            self.reading, self.writing = os.pipe()

    def rest(self) -> str:
        """Close our end for writing, and return all that was written."""
        os.close(self.writing)
        found = b""
        try:
            while block := os.read(self.reading, 1 << 16):
                found += block
        except OSError:
            pass  # a terminal's way to say that it is over
        os.close(self.reading)
        return found.decode()


@pytest.mark.fault(22)
@pytest.mark.parametrize(
    ("kind", "streams"),
    [
        ("terminal", "stdout"),
        pytest.param("pipe", "both", marks=pytest.mark.slow),
        pytest.param("terminal", "both", marks=pytest.mark.slow),
    ],
)
def test_a_terminal_that_nobody_reads_does_not_hold_up_the_watch(recipe: Recipe, kind: str, streams: str) -> None:
    overrides, run = recipe.words(
        "trainer.gpus=2",
        "trainer.epochs=400000",
        "trainer.log_every=1",
        "trainer.eval_every=0",
        "task._target_=points.Talks",
        "trainer.grace_seconds=600",
    )
    unread = Unread(kind)
    process = subprocess.Popen(
        [sys.executable, "-m", "ddpexp", *overrides], cwd=recipe.ddpexp.folder, stdin=subprocess.DEVNULL, text=True,
        env={**recipe.ddpexp.environ, "PACE": "0.0", "TERM": "xterm-256color"}, start_new_session=True,
        stdout=unread.writing, stderr=unread.writing if streams == "both" else subprocess.PIPE,
    )  # fmt: skip
    # Well more than a pipe (64 KiB) or a terminal (4 KiB) holds.
    wait_for(lambda: process.poll() is not None or trained(run, 100))
    process.send_signal(signal.SIGTERM)
    if streams == "stdout":
        done = finish(process, run)
        assert f"ddpexp: interrupted by SIGTERM; saved at step {done.result()['step']} in " in done.err
    assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    assert json.loads((run / "result.json").read_text())["status"] == "interrupted"
    shown = unread.rest()
    assert "recipe  points" in shown


@pytest.mark.fault(22)
def test_a_reader_that_comes_back_reads_on_in_order_and_sees_how_much_was_omitted(tmp_path: Path) -> None:
    """The terminal alone: a run takes minutes for as many lines."""
    unread = Unread("pipe")
    program = (
        "import sys, time; from ddpexp.system.terminal import Terminal; terminal = Terminal()\n"
        "for number in range(40_000): terminal.line(f'line {number}')\n"
        "print('said', file=sys.stderr, flush=True); sys.stdin.read(); terminal.close()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=unread.writing, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stdin is not None
    assert process.stderr.readline() == "said\n"  # it has not waited
    process.stdin.close()
    lines = unread.rest().splitlines()
    assert process.wait(PATIENCE) == 0
    numbers = [int(line.split()[1]) for line in lines if line.startswith("line ")]
    assert numbers == sorted(numbers)
    assert numbers[-10_000:] == list(range(30_000, 40_000))
    [left_out] = [line for line in lines if "omitted" in line]
    assert left_out == (
        f"... {40_000 - len(numbers):,} lines omitted because nobody read them; the run's log has all of them ..."
    )
    process.stderr.close()
