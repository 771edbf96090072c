"""Importing ddpexp has no effects: no process is started and no socket opened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PATIENCE

# Python's audit events (its documentation has a table of them). A process that a library starts in C is not among them.
WATCHED = """
import sys
STARTS = ("subprocess.", "os.fork", "os.exec", "os.spawn", "os.posix_spawn", "os.system", "pty.")

def note(event, arguments):
    if event.startswith(("socket.", *STARTS)):
        frame, place = sys._getframe(1), []
        while frame is not None and len(place) < 8:
            place.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            frame = frame.f_back
        if not any("/cuda/pathfinder/" in name for name in place):  # torch for CUDA: where is the C library?
            print(event, *place, file=sys.stderr)

sys.addaudithook(note)
"""
EVERY_MODULE = """
import importlib, pkgutil
import ddpexp, ddpexp.recipes

names = ["ddpexp"]
for package in (ddpexp, ddpexp.recipes):
    for found in pkgutil.walk_packages([package.__path__[0]], package.__name__ + "."):
        importlib.import_module(found.name)
        names.append(found.name)
print(*names)
"""


def watched(code: str, *argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WATCHED + code, *argv]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.mark.smoke
def test_importing_any_module_starts_no_process_and_opens_no_socket(tmp_path: Path) -> None:
    done = watched(EVERY_MODULE, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert {
        "ddpexp",
        "ddpexp.__main__",
        "ddpexp.train.worker",
        "ddpexp.launch.launchers.slurm",
        "ddpexp.recipes.mnist",
    } <= set(done.stdout.split())


def test_asking_for_help_starts_no_process_and_opens_no_socket(tmp_path: Path) -> None:
    done = watched(
        'import runpy; sys.argv[0] = "ddpexp"; runpy.run_module("ddpexp", run_name="__main__")', "--help", cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "recipe=mnist" in done.stdout


@pytest.mark.parametrize(
    ("code", "event"),
    [("import socket; socket.socket()", "socket.__new__"), ("import os; os.fork() or os._exit(0)", "os.fork")],
)
def test_the_watch_sees_both(tmp_path: Path, code: str, event: str) -> None:
    assert watched(code, cwd=tmp_path).stderr.startswith(event)
