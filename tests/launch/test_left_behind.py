"""The tests' own process: what a test leaves in it is named, and a hang at its end is one with a cause."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PATIENCE, ROOT

PROGRAM = """\
import sys
import pytest
from tests import conftest
conftest.LEFT_SECONDS, conftest.EXIT_SECONDS = 0.3, 1
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "tests.conftest", sys.argv[1]]))
"""
LEAVES = {
    "a thread": ("threading.Thread(target=time.sleep, args=(1,)).start()", r"left behind: <Thread("),
    "a fork": ("if os.fork() == 0: time.sleep(60); os._exit(0)", "left behind: process "),
    "a program": ("subprocess.Popen(['sleep', '60'])", "(sleep 60)"),
}


def run_tests(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Run a test of one line with the fixtures of these tests, in a process of its own."""
    path = folder / "test_one.py"
    path.write_text(f"import atexit, os, subprocess, threading, time\ndef test_it():\n    {body}\n")
    return subprocess.run(
        [sys.executable, "-u", "-c", PROGRAM, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.parametrize("what", LEAVES)
def test_what_a_test_leaves_alive_is_named_with_the_test(tmp_path: Path, what: str) -> None:
    body, said = LEAVES[what]
    done = run_tests(tmp_path, body)
    assert done.returncode == 1, done.stdout + done.stderr
    assert said in done.stdout
    assert "ERROR " in done.stdout
    assert "test_one.py::test_it" in done.stdout


def test_a_hang_after_the_summary_ends_with_every_stack(tmp_path: Path) -> None:
    done = run_tests(tmp_path, "atexit.register(time.sleep, 600)")
    assert "1 passed" in done.stdout
    assert done.returncode == 1
    assert "Timeout (0:00:01)!" in done.stderr
    assert "most recent call first" in done.stderr
