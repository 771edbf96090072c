"""What a page draws of the records of runs, as plain values; large files are read by several processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddpexp.report.records import read_records
from ddpexp.report.step_phases import bars
from ddpexp.report.thinned import Curve
from ddpexp.system import separate_process
from ddpexp.system.hardware import usable_cores

_DIGITS = 5  # of a value
_LARGE = 64 << 20  # bytes of all files, from which on a second process pays off
_MOST_PROCESSES = 8


def drawn(files: Sequence[Path], most_points: int) -> list[dict[str, Any]]:
    """Return for each metrics.jsonl its curves, epochs and times; each has at most about `most_points` points."""
    num_bytes = 0
    for file in files:
        with suppress(OSError):
            num_bytes += os.stat(file).st_size
    processes = min(usable_cores(), len(files), _MOST_PROCESSES)
    if num_bytes < _LARGE or processes < 2:
        return [_of_file(file, most_points) for file in files]

    def ask(number: int) -> Any:
        request = {"files": [os.fspath(file) for file in files[number::processes]], "most_points": most_points}
        return separate_process.call("ddpexp.report.drawn:answer", request)

    with ThreadPoolExecutor(processes) as threads:
        shares = list(threads.map(ask, range(processes)))
    return [shares[number % processes][number // processes] for number in range(len(files))]


def answer(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Do the same in a process of its own."""
    return [_of_file(Path(file), request["most_points"]) for file in request["files"]]


def _of_file(file: Path, most_points: int) -> dict[str, Any]:
    records = read_records(file, most_points)
    return {
        "curves": {name: _curve(of_metric) for name, of_metric in records.curves.items()},
        "epochs": [[step, round(epoch, 4)] for step, epoch in records.epochs],
        "times": bars(records.measured, spans=False),
        "spans": bars(records.measured, spans=True),
        "more": records.more,
    }


def _curve(curve: Curve) -> dict[str, Any]:
    """Return a curve with few characters: each step as the distance from the one before."""
    return {
        "x": [step - before for before, step in zip([0, *curve.steps], curve.steps, strict=False)],
        "y": [_rounded(value) for value in curve.values],
        "mean": [_rounded(value) for value in curve.means],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
