"""The order of samples, against torch's DistributedSampler and RandomSampler: the first index, an epoch, the memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.race import Arm, Figures, last_json, median, race, refuse_other_work
from benchmarks.suite import Bar, Bench, Chart, Report, Row, compare

_WAYS = {"ddpexp": "ddpexp", "DistributedSampler": "distributed", "RandomSampler": "random", "ddpexp again": "ddpexp"}
_LENGTHS = {60_000: "6e4", 10**6: "1e6", 10**8: "1e8", 10**9: "1e9"}
_TOO_LARGE = "torch's samplers are left out: their list of 1e9 numbers takes about 40 GB in every rank"


def run(bench: Bench) -> Report:
    ways = [name for name in _WAYS if not (bench.quick and name == "RandomSampler")]
    found = {60_000: _race(bench, 60_000, ways, epochs=21), 10**6: _race(bench, 10**6, ways, epochs=3)}
    shared = None if bench.quick else _race(bench, 60_000, ways, epochs=21, world=8)
    if not bench.quick:
        found[10**8] = _race(bench, 10**8, ways, epochs=0, rounds=2)  # ten seconds and gigabytes each
        found[10**9] = _race(bench, 10**9, ["ddpexp", "ddpexp again"], epochs=0)
    report = Report()
    for length, results in found.items():
        report.rows += _rows(length, results)
    if shared is not None:
        what = "an epoch of 6e4 samples, one rank of 8"
        report.rows.append(compare(shared, what, "epoch", _milliseconds, "DistributedSampler", bar=Bar("at most", 1.0)))
    report.charts = _charts(found)
    return report


def _race(
    bench: Bench, samples: int, ways: Sequence[str], *, epochs: int, world: int = 1, rounds: int | None = None
) -> Figures:
    def arm(name: str) -> Arm:
        typed = ["--way", _WAYS[name], "--samples", str(samples), "--world", str(world), "--epochs", str(epochs)]
        words = [sys.executable, "-m", "benchmarks.peers.order", *typed]
        return Arm(f"{name} {_LENGTHS[samples]} of {world}", lambda _: words, _figures)

    # RandomSampler knows no ranks.
    asked = [name for name in ways if world == 1 or name != "RandomSampler"]
    turns = bench.at_most(3 if bench.quick else 7) if rounds is None else bench.at_most(rounds)
    raced = race([arm(name) for name in asked], turns, bench.folder, bench.say)
    results = dict(zip(asked, raced.values(), strict=True))
    if epochs:
        refuse_other_work(results, "batches", 0)
    if epochs and world == 1:
        refuse_other_work(results, "sum", 0)  # every sample once
    return results


def _rows(length: int, results: Figures) -> list[Row]:
    of = f"of {_LENGTHS[length]} samples"
    if length == 10**9:
        first, memory = median(results, "ddpexp", "first"), median(results, "ddpexp", "memory")
        works = Row(f"first index {of}", f"{_milliseconds(first)}, {_megabytes(memory)}", met=True, note=_TOO_LARGE)
        return [works]
    far = length == 10**8
    rows = []
    for other in [name for name in ("DistributedSampler", "RandomSampler") if name in results]:
        bar = Bar("at least", 1000) if far else None
        rows += [
            compare(
                results, f"first index {of}, {other}, times faster", "first", _milliseconds, other, bar=bar, faster=True
            ),
            compare(
                results, f"its memory {of}, {other}, times less", "memory", _megabytes, other, bar=bar, faster=True
            ),
        ]
        if "epoch" in results["ddpexp"][0]:
            limit = Bar("at most", 1.0) if length == 60_000 and other == "DistributedSampler" else None
            rows.append(compare(results, f"an epoch {of}, {other}", "epoch", _milliseconds, other, bar=limit))
    return rows


def _charts(found: dict[int, Figures]) -> list[Chart]:
    titles = {"first": ("time to the first index", "seconds"), "memory": ("memory of the order", "bytes")}
    charts = []
    for figure, (title, unit) in titles.items():
        lines = {
            name: {
                str(length): [row[figure] for row in results[name]]
                for length, results in found.items()
                if name in results
            }
            for name in ("ddpexp", "DistributedSampler", "RandomSampler")
        }
        charts.append(Chart(title, unit, lines, x="samples", log=True))
    return charts


def _figures(_place: Path, output: str, _begin: float, _end: float) -> dict[str, float]:
    return last_json(output)


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:,.2f} ms"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.1f} MB"
