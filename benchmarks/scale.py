"""What hundreds and thousands of ranks cost each of them, and the leading command.

Simulated, as docs/benchmarks.md says.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks import predict
from benchmarks.race import Arm, Figures, Ratio, last_json, median, race, ratio
from benchmarks.suite import Bar, Bench, Chart, Report, Row

_SIZES = (64, 512, 4096)  # ranks
_SMALL, _LARGE = _SIZES[1:]
_ENDS = ("failure", "stop", "hang")
_A_COMMAND = {8: "8 ranks a command", 1: "1 rank a command"}
_FLAT = Bar("at most", 1.5)
_SOON = Bar("at most", 5)  # seconds, as for the death of one of two
_PLAN = ["recipe=mnist", "launcher=slurm", "trainer.device=cuda", "trainer.gpus=8", "trainer.nodes=512"]


def run(bench: Bench) -> Report:
    report = Report()
    _shares(bench, report)
    _commands(bench, report)
    _plan(bench, report)
    _predictions(bench, report)
    return report


def _shares(bench: Bench, report: Report) -> None:
    """One rank's own part: the order of samples, and its set-up."""
    figures = {"order": ("ns a sample", "us to the first"), "setup": ("setup ms", "MiB", "step ms")}
    arms = [
        _arm(f"{what} {size}", _among(what, size))
        for what in figures
        for size in (8, *_SIZES)
        if (what, size) != ("setup", 8)
    ]
    results = race(arms, bench.at_most(7), bench.folder / "among", bench.say)
    asked: list[tuple[str, str, str, str, Bar | None]] = [
        ("order", "ns a sample", "a sample of a rank's share of the order", "{:.0f} ns", _FLAT),
        ("order", "us to the first", "a rank's batch plan and its first batches", "{:.0f} µs", _FLAT),
        ("setup", "setup ms", "a rank's set-up in torch's fake process group, LeNet in DDP", "{:.1f} ms", None),
        ("setup", "MiB", "the memory of that, with the first steps", "{:.1f} MiB", _FLAT),
        ("setup", "step ms", "its step there, a CPU worker's: it adds up one part a rank, in order", "{:.1f} ms", None),
    ]
    for what, figure, text, unit, bar in asked:
        found = ratio(results, f"{what} {_LARGE}", f"{what} {_SMALL}", figure)
        values = [unit.format(median(results, f"{what} {size}", figure)) for size in (_LARGE, _SMALL)]
        report.rows.append(_flat(text, f"{values[0]} against {values[1]}", found, bar))
    more = [
        large["setup ms"] - small["setup ms"]
        for large, small in zip(results[f"setup {_LARGE}"], results[f"setup {_SMALL}"], strict=True)
    ]
    limit = Bar("at most", 50)  # once in a run; DDP compares the shapes of all ranks' parameters
    what = f"that set-up, more at {_LARGE:,} ranks than at {_SMALL}"
    report.rows.append(
        Row(what, f"{statistics.median(more):.1f} ms", "", "", f"{limit} ms", limit.met(statistics.median(more)))
    )
    points = {str(size): [row["ns a sample"] for row in results[f"order {size}"]] for size in (8, *_SIZES)}
    report.charts.append(Chart("a sample of a rank's share of the order", "nanoseconds", {"ddpexp": points}, x="ranks"))


def _commands(bench: Bench, report: Report) -> None:
    """What the command that leads has to do for all others."""
    arms = [
        _arm(_name(workers, size, end), _crowd(workers, size, end))
        for workers in _A_COMMAND
        for size in _SIZES
        for end in _ENDS
    ]
    results = race(arms, bench.at_most(3), bench.folder / "crowd", bench.say)
    costs = {
        "meet cpu": ("failure", "to bring all together", "{:.0f} µs"),
        "idle share": ("failure", "a second, while all train", "{:.2f} µs"),
        "save cpu": ("failure", "for an agreed save", "{:.1f} µs"),
        "failure cpu": ("failure", "for a failure that all others report too", "{:.0f} µs"),
        "hang cpu": ("hang", "to find who holds the others up", "{:.0f} µs"),
    }
    for workers, way in _A_COMMAND.items():
        report.rows += [
            _row_a_rank(
                results, workers, end, figure, f"the leading command's processor time a rank {text}, {way}", unit
            )
            for figure, (end, text, unit) in costs.items()
        ]
    for workers, way in _A_COMMAND.items():
        large = {end: _name(workers, _LARGE, end) for end in _ENDS}
        report.rows += [
            _row_seconds(
                results, large["failure"], "meet", f"{_LARGE:,} ranks from the first call to the start, {way}", _SOON
            ),
            _row_seconds(
                results, large["failure"], "save", f"{_LARGE:,} ranks from the signal to an agreed save, {way}", None
            ),
            _row_seconds(
                results, large["stop"], "stop", f"{_LARGE:,} ranks from SIGTERM to an agreed stop, {way}", _SOON
            ),
            _row_seconds(
                results,
                large["failure"],
                "failure",
                f"{_LARGE:,} ranks from a failure until all are told, {way}",
                _SOON,
            ),
            _row_seconds(
                results, large["hang"], "hang", f"{_LARGE:,} ranks from a silence until all are told, {way}", _SOON
            ),
        ]
        open_ = median(results, large["failure"], "descriptors")
        report.rows.append(Row(f"descriptors of the leading command, {_LARGE:,} ranks, {way}", f"{open_:.0f}"))
    for figure, (end, text, _) in costs.items():
        lines = {
            way: {
                str(size): [row[figure] / size * 1e6 for row in results[_name(workers, size, end)]] for size in _SIZES
            }
            for workers, way in _A_COMMAND.items()
        }
        report.charts.append(
            Chart(f"the leading command's processor time a rank {text}", "microseconds", lines, x="ranks")
        )


def _plan(bench: Bench, report: Report) -> None:
    """The real command, for ranks that are nowhere."""

    def command(_place: Path) -> list[str]:
        data = [f"data.root={bench.data}", "data.source=files", f"trainer.global_batch_size={8 * _LARGE}"]
        return [sys.executable, "-m", "ddpexp", "plan", *_PLAN, *data, "--json"]

    def figures(_place: Path, output: str, begin: float, end: float) -> dict[str, float]:
        if json.loads(output)["world"]["world_size"] != _LARGE:
            raise RuntimeError(f"that is no plan for {_LARGE} ranks: {output}")
        return {"seconds": end - begin}

    results = race([Arm("plan", command, figures)], bench.rounds, bench.folder / "plan", bench.say)
    row = _row_seconds(
        results, "plan", "seconds", f"ddpexp plan for {_LARGE:,} ranks, the whole command", Bar("at most", 10)
    )
    report.rows.append(row)


def _predictions(bench: Bench, report: Report) -> None:
    """A plan for four workers, from runs with one and two, against a run; beside it, what one run tells of the next."""
    bar = Bar("at most", 0.15)
    for model in predict.MODELS:
        found = []
        for number in range(bench.at_most(5)):
            begin = time.monotonic()
            one = predict.predict(model)
            found.append(one)
            bench.say(
                f"round {number + 1}  plan {model}: {one.error:+.1%} {one.disturbed} ({time.monotonic() - begin:.0f} s)"
            )
        wrong = statistics.median(abs(one.error) for one in found)
        signed = sorted(one.error for one in found)
        times = [one.measured_ms for one in found]
        figures = " against ".join(
            f"{statistics.median(values):.2f} ms" for values in ([one.predicted_ms for one in found], times)
        )
        again = (
            f"{statistics.median(abs(one / other - 1) for one, other in pairwise(times)):.3f}" if len(times) > 1 else ""
        )
        note = "; ".join(sorted({one.disturbed for one in found if one.disturbed}))
        what = f"a step of 4 workers planned from 1 and 2 against measured, {model}: error"
        shown = f"{wrong:.3f} ({signed[0]:+.3f} to {signed[-1]:+.3f})"
        report.rows.append(Row(what, figures, shown, again, str(bar), bar.met(wrong), note))


def _row_a_rank(results: Figures, workers: int, end: str, figure: str, what: str, unit: str) -> Row:
    small, large = (_name(workers, size, end) for size in (_SMALL, _LARGE))
    found = ratio(results, large, small, figure)
    share = _SMALL / _LARGE
    shown = [unit.format(median(results, arm, figure) / size * 1e6) for arm, size in ((large, _LARGE), (small, _SMALL))]
    return _flat(
        what,
        f"{shown[0]} against {shown[1]}",
        Ratio(found.median * share, found.low * share, found.high * share),
        _FLAT,
    )


def _flat(what: str, figures: str, found: Ratio, bar: Bar | None) -> Row:
    text = f"{what}: {_LARGE:,} ranks against {_SMALL}"
    return Row(text, figures, str(found), "", str(bar or ""), bar.met(found.median) if bar else None)


def _row_seconds(results: Figures, arm: str, figure: str, what: str, bar: Bar | None) -> Row:
    value = median(results, arm, figure)
    worst = max(row[figure] for row in results[arm])
    return Row(
        what,
        f"{value:.2f} s, at most {worst:.2f} s",
        "",
        "",
        f"{bar} s" if bar else "",
        bar.met(value) if bar else None,
    )


def _name(workers: int, size: int, end: str) -> str:
    return f"{size} by {workers} {end}"


def _arm(name: str, command: Callable[[Path], Sequence[str]]) -> Arm:
    return Arm(name, command, lambda _place, output, _begin, _end: last_json(output))


def _among(what: str, size: int) -> Callable[[Path], Sequence[str]]:
    return lambda _: [sys.executable, "-m", "benchmarks.among", "--what", what, "--world", str(size)]


def _crowd(workers: int, size: int, end: str) -> Callable[[Path], Sequence[str]]:
    words = ["--commands", str(size // workers), "--workers", str(workers), "--end", end]
    return lambda _: [sys.executable, "-m", "benchmarks.crowd", *words]
