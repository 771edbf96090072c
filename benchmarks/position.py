"""The first batch at four fifths of an epoch, against Accelerate's skip_first_batches."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.race import Arm, last_json, race
from benchmarks.suite import Bench, Chart, Report, compare, of_rounds


def run(bench: Bench) -> Report:
    def figures(_place: Path, output: str, _begin: float, _end: float) -> dict[str, float]:
        return last_json(output)

    def arm(name: str, way: str, samples: int, python: str = sys.executable) -> Arm:
        words = [python, "-m", "benchmarks.peers.position", "--way", way, "--samples", str(samples)]
        return Arm(name, lambda place: words, figures)

    arms = [arm("ddpexp", "ddpexp", 10**6), arm("ddpexp, 1e9", "ddpexp", 10**9), arm("ddpexp again", "ddpexp", 10**6)]
    if bench.peers is not None:
        arms.append(arm("Accelerate", "accelerate", 10**6, bench.peers))
    results = race(arms, bench.rounds, bench.folder, bench.say)

    def show(value: float) -> str:
        return f"{value * 1e3:.2f} ms"

    report = Report(
        charts=[Chart("first batch at 80 % of an epoch", "seconds", {"": of_rounds(results, "seconds")}, log=True)]
    )
    what = "first batch at 80 % of an epoch of a thousand million samples, against one of a million"
    report.rows.append(compare(results, what, "seconds", show, "ddpexp", mine="ddpexp, 1e9", again=None))
    if bench.peers is not None:
        what = "the same of a million samples, Accelerate's skip_first_batches"
        report.rows.append(compare(results, what, "seconds", show, "Accelerate"))
    return report
