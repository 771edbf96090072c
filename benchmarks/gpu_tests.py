"""A plugin of pytest for `benchmarks.gpu_correct`: writes each test's result at once, and bounds every test.

`$GPU_TESTS` is the file: a line of JSON for each test. `$GPU_TEST_SECONDS` bounds a test; one that hangs where Python
handles no signals ends its process a little later, which pytest-xdist replaces.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_GRACE = 10  # seconds
_TEXT = 1500  # characters
_OWN = ("benchmarks", "ddpexp", "examples", "recipes", "tests")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End a test that takes too long."""
    seconds = int(os.environ["GPU_TEST_SECONDS"])

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"the test had not ended after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(seconds + _GRACE, exit=True)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a test's result, or what its fixtures had to say; the process that shares the tests out does so."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    text = "" if report.passed else report.longreprtext[-_TEXT:]
    if report.skipped and isinstance(report.longrepr, tuple):
        text = report.longrepr[2].removeprefix("Skipped: ")
    _write(report.nodeid, report.outcome, round(report.duration, 2), text)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write which file could not be imported; one that needs a package that is not installed is skipped."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        absent = re.search(r"^E +ModuleNotFoundError: No module named '(\w+)", report.longreprtext, re.MULTILINE)
        if absent is not None and absent[1] not in _OWN:
            _write(report.nodeid, "skipped", 0.0, f"{absent[1]} is not installed")
        else:
            _write(report.nodeid, "failed", 0.0, report.longreprtext[-_TEXT:])


def _write(test: str, outcome: str, seconds: float, text: str) -> None:
    with Path(os.environ["GPU_TESTS"]).open("a") as file:
        print(json.dumps({"test": test, "outcome": outcome, "seconds": seconds, "text": text}), file=file)
