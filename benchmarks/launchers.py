"""Time to the first step under each launcher, against the plain script started in the same way.

Slurm wants SLURM_CONF.
"""

from __future__ import annotations

import os

from benchmarks.race import race
from benchmarks.starting import arms
from benchmarks.suite import Bench, Chart, Report, compare, of_rounds

_FEW = ["model=linear", "trainer.max_steps=60", "trainer.eval_every=0"]


def run(bench: Bench) -> Report:
    report = Report()
    groups = {}
    for way in ["torchrun", "mpirun"] + (["srun", "salloc"] if "SLURM_CONF" in os.environ else []):
        for workers in (2, 8):
            results = race(
                arms(bench.data, workers, _FEW, 60, way), bench.rounds, bench.folder / f"{way}-{workers}", bench.say
            )
            what = f"first step under {way}, {workers} workers"
            report.rows.append(compare(results, what, "first step", lambda value: f"{value:.2f} s", "plain script"))
            groups[f"{way}, {workers} workers"] = of_rounds(results, "first step")
    report.charts.append(Chart("command to first step", "seconds", groups))
    return report
