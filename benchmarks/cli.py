"""Commands that do not train: questions, and errors in the configuration, against the smallest application of Hydra."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.race import Arm, Figures, median, race
from benchmarks.suite import Bar, Bench, Chart, Report, Row, of_rounds

# Of each command the words of ours and of theirs; what is refused has the exit code 2 here and 1 there.
_ASKED = {
    "--help": (["--help"], ["--help"], False),
    "--cfg job": (["--cfg", "job"], ["--cfg", "job"], False),
    "an unknown option": (["model=lenett"], ["lrr=1"], True),
    "an unknown key": (["optimizer.lrr=1"], ["lrr=1"], True),
    "a wrong value": (["optimizer.lr=fast"], ["lrr=1"], True),
}
_BAR = Bar("at most", 0.1)


def run(bench: Bench) -> Report:
    report, groups = Report(), {}
    for what, (ours, theirs, refused) in _ASKED.items():
        arms = [
            _arm("ddpexp", "ddpexp", ours, 2 if refused else 0),
            _arm("Hydra alone", "benchmarks.peers.hydra_smallest", theirs, 1 if refused else 0),
            _arm("ddpexp again", "ddpexp", ours, 2 if refused else 0),
        ]
        folder = bench.folder / what.replace(" ", "-")
        race(arms[:2], 1, folder / "warm", lambda text: None)  # their bytecode is compiled now
        results = race(arms, bench.at_most(3) if bench.quick else bench.rounds, folder, bench.say)
        report.rows.append(_row(what, results))
        groups[what] = of_rounds(results, "seconds")
    report.charts.append(Chart("the whole command", "seconds", groups))
    return report


def _arm(name: str, module: str, words: Sequence[str], code: int) -> Arm:
    def command(_place: Path) -> list[str]:
        return [sys.executable, "-m", module, *words]

    def figures(_place: Path, _output: str, begin: float, end: float) -> dict[str, float]:
        return {"seconds": end - begin}

    return Arm(name, command, figures, code=code)


def _row(what: str, results: Figures) -> Row:
    middle, shown = _more(results, "ddpexp", "Hydra alone")
    figures = f"{median(results, 'ddpexp', 'seconds'):.2f} s against {median(results, 'Hydra alone', 'seconds'):.2f} s"
    again = _more(results, "ddpexp again", "ddpexp")[1]
    return Row(f"{what}, seconds more than Hydra alone", figures, shown, again, str(_BAR), _BAR.met(middle))


def _more(results: Figures, arm: str, other: str) -> tuple[float, str]:
    """Return by how many seconds an arm takes longer than another, the median of the rounds.

    And the same shown with quartiles.
    """
    pairs = zip(results[arm], results[other], strict=True)
    found = sorted(mine["seconds"] - theirs["seconds"] for mine, theirs in pairs)
    low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
    return middle, f"{middle:.3f} ({low:.3f} to {high:.3f})"
