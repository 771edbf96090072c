"""What a fork finds, whatever libraries have left in the process that forks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpexp.system.forks import fork
from ddpexp.system.process import children, is_gone
from tests.conftest import PATIENCE, ROOT
from tests.points import wait_for

pytestmark = pytest.mark.smoke


@pytest.mark.slow
def test_a_fork_finds_what_is_documented_beside_whatever_users_import(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "always:This process", "-m", "tests.crowded", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    signal_line, line = done.stdout.splitlines()
    codes, before, drawn = json.loads(line)
    assert (signal_line, codes) == ("", [7, 7])
    forks = [json.loads((tmp_path / str(number)).read_text()) for number in range(2)]
    for found in forks:
        assert found["descriptors"] == before
        assert found["wakeup"] == -1
        assert not found["looping"]
        assert (found["awaited"], found["threaded"], found["threads"]) == (5, [1, 2], [1, True])
        assert found["multiplied"] == 2 * 300.0**3
        assert found["blocked"] == []
        assert "_sighandler_noop" in found["handlers"]["SIGTERM"]  # the loop's, as in the parent
        assert found["drawn"][1:] == drawn[1:]  # those of numpy and torch are as they were in the parent
    assert len({found["drawn"][0] for found in forks} | {drawn[0]}) == 3  # Python seeds its own anew


def test_a_fork_that_raises_ends_with_1_and_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise KeyboardInterrupt("early")

    pid = fork(fail)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert capfd.readouterr().err.endswith("KeyboardInterrupt: early\n")


def test_a_fork_dies_with_its_parent() -> None:
    program = "import time; from ddpexp.system.forks import fork; fork(lambda: time.sleep(600)); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    wait_for(lambda: bool(children(parent.pid)))
    [child] = children(parent.pid)
    parent.kill()
    parent.wait()
    wait_for(lambda: is_gone(child))
