"""The first batch at four fifths of an epoch, against Accelerate's skip_first_batches."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.race import Arm, last_json, median, race
from benchmarks.suite import Bar, Bench, Chart, Report, Row, compare, of_rounds

_KINDS = {
    "text": "text of a billion tokens",
    "mixture": "a mixture of two such texts",
    "shards": "a billion samples in blocks",
}


def run(bench: Bench) -> Report:
    def figures(_place: Path, output: str, _begin: float, _end: float) -> dict[str, float]:
        return last_json(output)

    def arm(name: str, way: str, samples: int, python: str = sys.executable) -> Arm:
        words = [python, "-m", "benchmarks.peers.position", "--way", way, "--samples", str(samples)]
        return Arm(name, lambda place: words, figures)

    arms = [arm("ddpexp", "ddpexp", 10**6), arm("ddpexp, 1e9", "ddpexp", 10**9), arm("ddpexp again", "ddpexp", 10**6)]
    arms += [arm(kind, kind, 10**9) for kind in _KINDS]
    if bench.peers is not None:
        arms.append(arm("Accelerate", "accelerate", 10**6, bench.peers))
    results = race(arms, bench.rounds, bench.folder, bench.say)

    def show(value: float) -> str:
        return f"{value * 1e3:.2f} ms"

    report = Report(
        charts=[Chart("first batch at 80 % of an epoch", "seconds", {"": of_rounds(results, "seconds")}, log=True)]
    )
    what = "first batch at 80 % of an epoch of a billion samples, against one of a million"
    report.rows.append(compare(results, what, "seconds", show, "ddpexp", mine="ddpexp, 1e9", again=None))
    limit = Bar("at most", 5)
    for kind, what in _KINDS.items():
        milliseconds = median(results, kind, "seconds") * 1e3
        met = limit.met(milliseconds)
        report.rows.append(Row(f"first batch, {what}", f"{milliseconds:.2f} ms", bar=f"{limit} ms", met=met))
    if bench.peers is not None:
        what = "the same of a million samples, Accelerate's skip_first_batches"
        report.rows.append(compare(results, what, "seconds", show, "Accelerate"))
    return report
