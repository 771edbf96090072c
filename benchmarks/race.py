"""Run commands in turn and compare them round by round, so that a machine whose speed drifts does not decide."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Figures = dict[str, list[dict[str, float]]]
"""Of each arm its figures, by round."""


@dataclass(frozen=True)
class Arm:
    """One program in a race."""

    name: str
    command: Callable[[Path], Sequence[str]]  # from a new, empty folder to the words
    figures: Callable[[Path, str, float, float], dict[str, float]]  # folder, output, seconds at start and end
    environ: Mapping[str, str] = field(default_factory=dict)
    code: int = 0  # its exit code, where it is to refuse something
    tries: int = 1


@dataclass(frozen=True)
class Ratio:
    """One arm's figure as a share of another's, over the rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        """Show the median and the quartiles."""
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def race(arms: Sequence[Arm], rounds: int, folder: Path, say: Callable[[str], None]) -> Figures:
    """Run every arm once a round, each round in another order; return each arm's figures by round.

    Raises:
        RuntimeError: a program failed; its output is in the message.
    """
    results: Figures = {arm.name: [] for arm in arms}
    for number in range(rounds):
        for arm in random.Random(number).sample(arms, len(arms)):
            figures = _run(arm, folder / f"{re.sub('[^A-Za-z0-9.]+', '-', arm.name)}-{number}", say)
            results[arm.name].append(figures)
            say(f"round {number + 1}/{rounds}  {arm.name:<24}" + "  ".join(f"{k} {v:.3f}" for k, v in figures.items()))
    return results


def _run(arm: Arm, place: Path, say: Callable[[str], None]) -> dict[str, float]:
    for left in reversed(range(arm.tries)):
        place.mkdir(parents=True)
        start = time.time()
        done = subprocess.run(
            arm.command(place), capture_output=True, text=True, check=False, env=environ(arm.environ), timeout=1800
        )
        end = time.time()
        if done.returncode == arm.code:
            return arm.figures(place, done.stdout, start, end)
        if left:
            say(f"{arm.name} ended with {done.returncode}: once more")
            shutil.rmtree(place)
    raise RuntimeError(f"{arm.name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


def ratio(results: Figures, arm: str, other: str, figure: str) -> Ratio:
    """Divide `arm` by `other` in each round."""
    pairs = zip(results[arm], results[other], strict=True)
    return quartiles([mine[figure] / theirs[figure] for mine, theirs in pairs])


def quartiles(values: Sequence[float]) -> Ratio:
    """Return the middle of ratios and their quartiles."""
    cut = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return Ratio(statistics.median(values), cut[0], cut[2])


def median(results: Figures, arm: str, figure: str) -> float:
    """Return the middle figure of an arm."""
    return statistics.median(row[figure] for row in results[arm])


def last_json(output: str) -> dict[str, float]:
    """Read the last line that is a JSON object."""
    found: dict[str, float] = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
    return found


def refuse_other_work(results: Figures, figure: str, tolerance: float) -> None:
    """See that all arms of all rounds have reached the same, relatively: who does other work is not in the race.

    Raises:
        RuntimeError: an arm has not.
    """
    found = {arm: [row[figure] for row in rows] for arm, rows in results.items()}
    middle = statistics.median(value for values in found.values() for value in values)
    if any(abs(value - middle) > tolerance * abs(middle) for values in found.values() for value in values):
        raise RuntimeError(f"the programs differ in {figure}: {found}")


def environ(own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program, which finds this checkout and the packages that this process finds."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DDPEXP_")}
    paths = [str(Path(__file__).resolve().parent.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**kept, **own, "PYTHONWARNINGS": "ignore", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
