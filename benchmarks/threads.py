"""The same convolutional training under every launcher with its threads left alone, and raw mp.spawn.

Slurm wants SLURM_CONF.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from benchmarks.equal import FASTEST, Job
from benchmarks.peers.job import EVERY
from benchmarks.race import Figures, median, ratio
from benchmarks.suite import Bar, Bench, Chart, Report, Row, compare, of_rounds

_LAUNCHERS = ["spawn", "torchrun", "elastic", "mpirun"]
_SPREAD = 1.03
_STEPS = 400


def run(bench: Bench) -> Report:
    job = Job(bench, bench.folder, "lenet", 2, _STEPS)
    ways = _LAUNCHERS + (["srun", "salloc"] if "SLURM_CONF" in os.environ else [])
    arms = [job.ours("ddpexp" if way == "spawn" else way, way=way) for way in ways]
    raw = job.by_hand("mp.spawn", "--spawn", "--threads", "0", "--reduce", "ddp")
    results = job.run([*arms, raw, job.ours("ddpexp again")], bench.rounds)
    report = Report(
        charts=[
            Chart("LeNet, 2 workers, threads left alone", "steps a second", {"": of_rounds(results, "steps a second")})
        ]
    )
    for arm in arms[1:]:
        what = f"steps a second, LeNet, 2 workers, spawn against {arm.name}"
        report.rows.append(compare(results, what, "steps a second", lambda value: f"{value:,.0f}", arm.name))
    what = "steps a second, LeNet, 2 workers, raw mp.spawn, all cores for every rank"
    report.rows.append(compare(results, what, "steps a second", lambda value: f"{value:,.0f}", raw.name))
    names = [arm.name for arm in arms]
    (best, worst), spread = _spread(results, names, "steps a second")
    bar, again = Bar("at most", _SPREAD), ratio(results, "ddpexp again", "ddpexp", "steps a second")
    note = f"of each program's fastest {EVERY} steps: {_spread(results, names, FASTEST)[1]:.3f}"
    report.rows.append(
        Row(
            "best to worst of our launchers",
            f"{best} to {worst}",
            f"{spread:.3f}",
            str(again),
            str(bar),
            bar.met(spread),
            note,
        )
    )
    return report


def _spread(results: Figures, arms: Sequence[str], figure: str) -> tuple[tuple[str, str], float]:
    """Return the best and the worst launcher with their figures, and how many times better the best one is."""
    rates = {arm.replace("ddpexp", "spawn"): median(results, arm, figure) for arm in arms}
    best, worst = max(rates, key=lambda name: rates[name]), min(rates, key=lambda name: rates[name])
    return (f"{rates[best]:,.0f} ({best})", f"{rates[worst]:,.0f} ({worst})"), rates[best] / rates[worst]
