"""What a person sees of a run: a bar on a terminal, plain lines elsewhere, the result last."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import Any

import pexpect
import pytest

from ddpexp.system.text import line_of_output
from tests.conftest import PATIENCE, ROOT, SMALL, Ddpexp, finish
from tests.points import wait_for

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HEADLINE = ["recipe", "data", "model", "world", "batch", "steps", "folder"]


@pytest.fixture(scope="module")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What a command shows is tested: its fork server is a fork."""
    return warm_environ


@pytest.mark.parametrize(
    ("printed", "line"),
    [
        ("plain\ttext, \u4f60\u597d", "plain\ttext, \u4f60\u597d"),
        ("\r 1%\r 50%\r100%", "100%"),
        ("100%\r", "100%"),
        ("\x1b[1;31mred\x1b[0m and \x1b[32mgreen", "\x1b[1;31mred\x1b[0m and \x1b[32mgreen\x1b[m"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
        ("\x1b[2J\x1b[Hcleared\x07", "\\x1b[2J\\x1b[Hcleared\\x07"),
        ("\x1b]0;title\x07a\x08b\x9b2J\0", "\\x1b]0;title\\x07a\\x08b\\x9b2J\\x00"),
    ],
)
def test_a_line_of_a_program_cannot_move_the_cursor(printed: str, line: str) -> None:
    assert line_of_output(printed) == line


def shown(ddpexp: Ddpexp, *overrides: str, **environ: str) -> str:
    """Run on a terminal of 100 columns and return all that it received."""
    variables: Any = {**ddpexp.environ, "TERM": "xterm-256color", **environ}
    child = pexpect.spawn(
        sys.executable, ["-m", "ddpexp", *SMALL, *overrides, f"run.dir={ddpexp.folder}/run"],
        env=variables, cwd=str(ddpexp.folder), encoding="utf-8", dimensions=(40, 100), timeout=PATIENCE,
    )  # fmt: skip
    child.expect(pexpect.EOF)
    child.close()
    text: str = child.before
    assert child.exitstatus == 0, text
    return text


def screen(text: str) -> list[str]:
    """Return the lines that stay on the screen.

    What is drawn after a return to the line's start replaces what was there.
    """
    plain = CONTROL.sub("", text)
    return [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in plain.split("\n")]


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}], ids=["colours", "no-colour"])
def test_a_terminal_shows_a_bar_and_the_result_as_the_last_line(ddpexp: Ddpexp, variables: dict[str, str]) -> None:
    text = shown(ddpexp, "trainer.gpus=2", **variables)
    assert "\x1b[" in text  # the bar moves
    if variables:
        assert not re.search(r"\x1b\[[0-9;]*3[0-9;]*m", text)  # bold perhaps, colours never
    lines = [line for line in screen(text) if line]
    assert [line.split()[0] for line in lines[:7]] == HEADLINE
    assert re.fullmatch(r"done    eval/loss \S+  eval/accuracy \S+%  in \S+ s  see run", lines[-1])
    bars = [line for line in lines if "10/10" in line and "━" in line]
    assert bars
    assert re.search(r"10/10 loss \S+  accuracy \S+%", bars[-1])
    # Whole lines: an evaluation is not drawn into the bar.
    evaluations = [line for line in lines if "eval/loss" in line and not line.startswith("done")]
    assert len(evaluations) == 2
    for line in evaluations:
        assert re.fullmatch(r"step +\d+/10  epoch +\d\.00  eval/loss \S+  eval/accuracy \S+%", line), line


def test_a_dumb_terminal_gets_plain_lines(ddpexp: Ddpexp) -> None:
    text = shown(ddpexp, TERM="dumb")
    assert "\x1b" not in text
    assert [line.split()[0] for line in screen(text) if line] == [*HEADLINE, "step", "step", "step", "step", "done"]


def test_without_a_terminal_there_are_plain_lines_in_order(ddpexp: Ddpexp) -> None:
    done = ddpexp(*SMALL, "trainer.gpus=2")
    assert (done.code, done.err) == (0, "")
    assert "\x1b" not in done.out
    assert "\r" not in done.out
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines] == [*HEADLINE, "step", "step", "step", "step", "done"]
    assert ["samples/s" in line for line in lines[7:11]] == [True, False, True, False]
    assert lines[3] == "world   2 CPU workers (gloo, gradients through shared memory), 1 thread each"
    assert lines[4] == "batch   128 = micro-batch 64 x 1 accumulation step x 2 ranks"
    assert lines[5] == "steps   10 (2 epochs of 5 steps)"
    log = (done.run / "run.log").read_text()
    assert all(line in log for line in lines)


def test_a_command_that_was_stopped_for_a_while_shows_everything_in_order(ddpexp: Ddpexp) -> None:
    process, run = ddpexp.start(*SMALL, "trainer.gpus=2", "trainer.log_every=2")
    wait_for((run / "metrics.jsonl").exists)  # all workers are there
    process.send_signal(signal.SIGSTOP)
    wait_for((run / "result.json").exists)  # the workers do not wait for the terminal
    process.send_signal(signal.SIGCONT)
    done = finish(process, run)
    assert (done.code, done.err) == (0, "")
    kinds = ["train" if "samples/s" in line else "eval" for line in done.out.splitlines() if line.startswith("step ")]
    assert kinds == ["train", "train", "eval", "train", "train", "train", "eval"]
    assert done.out.splitlines()[-1].startswith("done ")


@pytest.mark.fault(22)
def test_a_reader_that_leaves_does_not_end_the_run(ddpexp: Ddpexp) -> None:
    run = ddpexp.folder / "run"
    command = [sys.executable, "-m", "ddpexp", *SMALL, f"run.dir={run}"]
    reading, writing = os.pipe()
    process = subprocess.Popen(
        command, cwd=ddpexp.folder, env=ddpexp.environ, stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)  # as `| head -1` does
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "")
    assert (run / "result.json").is_file()


ACTIVITIES = """
import time
from ddpexp.system import terminal
terminal._MOMENT_SECONDS = 1e9
shown = terminal.Terminal()
shown.activity("saving", 0, 0)
shown.activity("saving", 1, 1)  # a moment
shown.close()
terminal._MOMENT_SECONDS = 0
shown = terminal.Terminal()
shown.activity("evaluation of eval", 1, 4)  # before the first step
time.sleep(0.5)
shown.activity("evaluation of eval", 4, 4)
shown.progress({"done": 3, "total": 9, "text": "loss 2", "line": ""})
shown.activity("evaluation of other", 2, 5)
time.sleep(0.5)
shown.progress({"done": 9, "total": 9, "text": "loss 1", "line": ""})  # whose end was not sent
shown.line("done")
shown.close()
"""


def test_an_evaluation_and_a_save_have_a_bar_below_that_of_the_steps_if_they_take_a_while() -> None:
    child = pexpect.spawn(
        sys.executable, ["-c", ACTIVITIES], cwd=str(ROOT), env={**os.environ, "TERM": "xterm-256color"},
        encoding="utf-8", dimensions=(40, 100), timeout=PATIENCE,
    )  # fmt: skip
    child.expect(pexpect.EOF)
    child.close()
    text = CONTROL.sub("", child.before)
    for bar in ("1/4 +evaluation of eval", "3/9 +loss 2", "2/5 +evaluation of other", "9/9 +loss 1"):
        assert re.search(rf"━ {bar}", text) or re.search(rf"━ +{bar}", text), (bar, text)
    assert "saving" not in text
    assert screen(child.before)[-2].startswith("done")
