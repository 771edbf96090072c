"""The whole command to over 99 %, against pytorch/examples' program, and the accuracy over five seeds."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from benchmarks.race import Arm, race
from benchmarks.suite import Bar, Bench, Chart, Report, Row, compare, mnist_words, of_rounds, result, trained


def run(bench: Bench) -> Report:
    accuracies = []
    for seed in range(5):
        ended = trained(bench.data, bench.folder / f"seed{seed}", f"trainer.seed={seed}")
        accuracies.append(result(ended)["metrics"]["eval/accuracy"])  # type: ignore[index]
        bench.say(f"seed {seed}: {accuracies[-1]:.2%}")

    def figures(_place: Path, _output: str, begin: float, end: float) -> dict[str, float]:
        return {"seconds": end - begin}

    def ours(place: Path) -> list[str]:
        return mnist_words(bench.data, place / "run")

    peer = [sys.executable, "-m", "benchmarks.peers.examples_mnist", "--data", str(bench.data)]
    arms = [
        Arm("ddpexp", ours, figures),
        Arm("pytorch/examples", lambda place: peer, figures),
        Arm("ddpexp again", ours, figures),
    ]
    results = race(arms, bench.at_most(3), bench.folder, bench.say)  # the other takes minutes
    mean, low, high = statistics.mean(accuracies), min(accuracies), max(accuracies)
    rows = [
        Row("seeds 0 to 4", f"{mean:.2%} in the mean, {low:.2%} to {high:.2%}"),
        compare(results, "whole command to 99 %, times faster", "seconds", lambda value: f"{value:.1f} s",
            "pytorch/examples",
                bar=Bar("at least", 10), faster=True),
    ]  # fmt: skip
    return Report(rows, [Chart("whole command to 99 %", "seconds", {"": of_rounds(results, "seconds")})])
