"""How long a save holds the training up, and what it costs in all, against torch.save.

And torch's distributed checkpoint.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.race import Arm, last_json, race
from benchmarks.starting import started
from benchmarks.suite import Bench, Chart, Report, compare, of_rounds


def _arm(name: str, way: str, millions: int, every: int, num_steps: int) -> Arm:
    program = ["-m", "benchmarks.peers.checkpoints", "--way", way, "--millions", str(millions), "--every", str(every)]

    def command(place: Path) -> list[str]:
        return started(
            "torchrun", 2, [*program, "--steps", str(num_steps), "--folder", str(place / "saved")], ours=False
        )

    def figures(place: Path, output: str, _begin: float, _end: float) -> dict[str, float]:
        shutil.rmtree(place)  # gigabytes
        return last_json(output)

    return Arm(name, command, figures)


def run(bench: Bench) -> Report:
    report = Report()
    stalls = {}
    for millions, number in ((25, 40), (100, 20)):
        ways = {"ddpexp": "ddpexp", "torch.save": "torch_save", "async_save": "dcp_async", "ddpexp again": "ddpexp"}
        arms = [_arm(name, way, millions, 10, number) for name, way in ways.items()]
        results = race(arms, bench.at_most(3), bench.folder / f"stall-{millions}", bench.say)
        for peer in ("torch.save", "async_save"):
            what = f"stall of a checkpoint, {millions} million parameters and momentum, {peer}"
            report.rows.append(compare(results, what, "stall", lambda value: f"{value * 1e3:.0f} ms", peer))
        stalls[f"{millions} million parameters"] = of_rounds(results, "stall")
    ways = {"ddpexp": "ddpexp", "none": "none", "none again": "none"}
    results = race(
        [_arm(name, way, 25, 50, 100) for name, way in ways.items()], bench.at_most(3), bench.folder / "lost", bench.say
    )
    what = "100 steps with a checkpoint every 50, 25 million parameters and momentum, against none"
    report.rows.append(compare(results, what, "seconds", lambda value: f"{value:.1f} s", "none", again=None))
    report.charts.append(Chart("stall of a checkpoint", "seconds", stalls, log=True))
    return report
