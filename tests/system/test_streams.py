"""What a process of ddpexp prints: masked on standard output and standard error, for itself and what it forks."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from ddpexp.system.programs import python
from ddpexp.system.streams import MaskedText
from tests.conftest import PATIENCE

ENVIRON = {"DDPEXP_SECRETS": "MINE", "MINE": "q5zk-planted"}
PRINTS = """
import os, sys, warnings

def tell():
    print("out", os.environ["MINE"])
    sys.stdout.write("written " + os.environ["MINE"] + "\\n")
    sys.stderr.write("err " + os.environ["MINE"] + "\\n")
    sys.stdout.flush()
    os.environ["LATE_TOKEN"] = "late-4711-late"
    print("late", os.environ["LATE_TOKEN"], flush=True)
    if os.fork() == 0:
        print("forked", os.environ["MINE"], flush=True)
        os._exit(0)
    os.wait()
    raise ValueError(os.environ["MINE"])
"""


def run(argv: list[str], folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **ENVIRON, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.run([argv[0], *options, *argv[1:]], env=environ, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.parametrize("options", [[], ["-u"]])
def test_a_process_masks_what_it_prints_and_what_it_dies_of(
    tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "telling.py").write_text(PRINTS)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    done = run(python("telling:tell"), tmp_path, *options)
    assert done.stdout.splitlines() == ["out ${MINE}", "written ${MINE}", "late ${LATE_TOKEN}", "forked ${MINE}"]
    assert done.stderr.startswith("err ${MINE}\n")
    assert done.stderr.endswith("ValueError: ${MINE}\n")
    assert ENVIRON["MINE"] not in done.stderr


def test_a_command_masks_what_a_library_prints(tmp_path: Path) -> None:
    """`--cfg job` is answered by Hydra itself."""
    done = run(
        [sys.executable, "-m", "ddpexp", "--cfg", "job", "recipe=mnist", "data.root=/data/q5zk-planted"], tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "${oc.env:MINE}" in done.stdout
    assert "q5zk-planted" not in done.stdout + done.stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with io.FileIO(writing, "w") as raw:
        stream = MaskedText(raw, write_through=True)
        assert stream.write("text") == 4
        stream.flush()
        with suppress(BrokenPipeError):
            stream.detach()
