"""What a benchmark gets, and what it gives back: rows of a table with their bars, and charts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.race import Figures, median, ratio

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Bar:
    """What a figure must be: at most, or at least, a limit."""

    sense: Literal["at most", "at least"]
    limit: float

    def met(self, value: float) -> bool:
        """Tell whether a value is on the right side."""
        return value <= self.limit if self.sense == "at most" else value >= self.limit

    def __str__(self) -> str:
        """Show the limit as the table does."""
        return f"{'≤' if self.sense == 'at most' else '≥'} {self.limit:g}"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    figures: str  # ours against theirs, with units
    ratio: str = ""  # the median of the rounds, with quartiles
    again: str = ""  # the same of two runs of ours: the machine's noise
    bar: str = ""
    met: bool | None = None
    note: str = ""  # why a bar is missed, or what was different
    value: float | None = None  # what the bar is for, where it is a ratio


@dataclass(frozen=True)
class Chart:
    """Bars: for each group each arm's figures of all rounds. Lines.

    For each arm its figure at each number, where `x` names it.
    """

    title: str
    unit: str
    groups: Mapping[str, Mapping[str, Sequence[float]]]
    x: str | None = None
    log: bool = False


@dataclass
class Report:
    """What a benchmark has found."""

    rows: list[Row] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    """Where a benchmark runs and with what."""

    data: Path  # a cache with MNIST's files, made ready
    folder: Path  # its own, empty
    rounds: int
    quick: bool  # the few arms that show a regression, in seconds
    peers: str | None  # the Python of an environment with Lightning, Fabric and Accelerate
    say: Callable[[str], None] = print
    nanogpt: Path | None = None  # nanoGPT's repository
    text: Path | None = None  # a text to train on
    steps: int | None = None  # of the runs of gpt
    airbench: Path | None = None  # cifar10-airbench's repository

    def at_most(self, rounds: int) -> int:
        """Return the rounds for a benchmark whose programs take long."""
        return min(self.rounds, rounds)


def compare(
    results: Figures,
    what: str,
    figure: str,
    show: Callable[[float], str],
    other: str,
    *,
    mine: str = "ddpexp",
    again: str | None = "ddpexp again",
    bar: Bar | None = None,
    faster: bool = False,
    note: str = "",
    within: float | None = None,
) -> Row:
    """Compare an arm with another, round by round.

    Mine divided by the other's, or the other way round with `faster`. The row is invalid where two runs of ddpexp
    differ by more than the share `within`.
    """
    ours, theirs = median(results, mine, figure), median(results, other, figure)
    found = ratio(results, other, mine, figure) if faster else ratio(results, mine, other, figure)
    noise = ratio(results, again, mine, figure) if again is not None and again in results else None
    if within is not None and noise is not None and abs(noise.median - 1) > within:
        bar, note = None, f"invalid: the A/A differs by more than {within:.0%}"
    met = bar.met(found.median) if bar is not None else None
    value = found.median if bar is not None else None
    shown = f"{show(ours)} against {show(theirs)}"
    return Row(what, shown, str(found), str(noise or ""), str(bar or ""), met, note, value)


def of_rounds(results: Figures, figure: str) -> dict[str, list[float]]:
    """Return one figure of every arm, by round, for a chart."""
    return {arm: [row[figure] for row in rows] for arm, rows in results.items() if all(figure in row for row in rows)}


def mnist_words(data: Path, run: Path, *words: str) -> list[str]:
    """Return the words of a run of the MNIST recipe with two workers."""
    typed = ["recipe=mnist", "trainer.gpus=2", f"data.root={data}", "data.source=files", f"run.dir={run}"]
    return [sys.executable, "-m", "ddpexp", *typed, *words]


def trained(data: Path, run: Path, *words: str) -> Path:
    """Run the MNIST recipe and return its run directory."""
    subprocess.run(mnist_words(data, run, *words), check=True, capture_output=True)
    return run


def records(run: Path) -> list[dict[str, float]]:
    """Read what a run has recorded."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def result(run: Path) -> dict[str, float]:
    """Read a run's result."""
    found: dict[str, float] = json.loads((run / "result.json").read_text())
    return found
