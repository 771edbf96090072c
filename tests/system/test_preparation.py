"""What is shown of a preparation that takes a while."""

from __future__ import annotations

import re
import sys

import pexpect
import pytest

from ddpexp.system import preparation as module
from ddpexp.system.preparation import preparation
from tests.conftest import PATIENCE, ROOT

BAR = """
import time
from ddpexp.system import preparation as module
module._SHOWN_SECONDS = module._BAR_SECONDS = 0
with module.preparation(3, "indexing the shards", "shards") as advance:
    for _ in range(3):
        advance(1)
        time.sleep(0.3)
print("ready")
"""


def test_without_a_terminal_there_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with preparation(4, "encoding the text", "bytes") as advance:
        advance(4)  # at once
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(module, "_LINE_SECONDS", -1.0)
    with preparation(4_000_000, "encoding the text", "bytes") as advance:
        advance(1_000_000)
        advance(3_000_000)
        advance(1)  # more than was expected
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"ddpexp: encoding the text: 1 MB of 4 MB, about 0\.\d s left", first)
    assert re.fullmatch(r"ddpexp: encoding the text: 4 MB of 4 MB, about 0\.0 s left", second)


def test_a_terminal_shows_a_bar_that_goes_away() -> None:
    child = pexpect.spawn(sys.executable, ["-c", BAR], cwd=str(ROOT), encoding="utf-8", timeout=PATIENCE)
    child.expect("indexing the shards: 2 shards of 3 shards")
    child.expect("ready")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
