"""Small models on one host: ddpexp's defaults against DDP's over gloo, and a loop with one flat all-reduce and no DDP."""

from __future__ import annotations

from benchmarks.equal import Job
from benchmarks.suite import Bar, Bench, Chart, Report, compare, of_rounds

_TIMES = {("deep", 2): 4.0, ("deep", 4): 6.0, ("lenet", 2): 1.3, ("lenet", 4): 1.8}
_NAMES = {"deep": "MLP of 63,370 parameters", "lenet": "LeNet"}
_STEPS = {"deep": 1000, "lenet": 500}


def run(bench: Bench) -> Report:
    report = Report()
    groups = {}
    for (model, workers), times in _TIMES.items():
        if bench.quick and workers > 2:
            continue
        job = Job(bench, bench.folder / f"{model}-{workers}", model, workers, _STEPS[model])
        arms = [
            job.ours("ddpexp", "trainer.threads=1"),
            job.by_hand("DDP", "--reduce", "ddp"),
            *([] if bench.quick else [job.by_hand("flat all-reduce", "--reduce", "flat")]),
            job.ours("ddpexp again", "trainer.threads=1"),
        ]
        results = job.run(arms, bench.rounds)
        for arm in arms[1:-1]:
            what = f"steps a second, {_NAMES[model]}, {workers} workers, {arm.name}"
            bar = Bar("at least", times) if arm.name == "DDP" else None
            report.rows.append(compare(results, what, "steps a second", lambda value: f"{value:,.0f}", arm.name, bar=bar))
        groups[f"{_NAMES[model]}, {workers} workers"] = of_rounds(results, "microseconds a step")
    report.charts.append(Chart("a step on one host of two cores, batch 32 a rank", "microseconds", groups))
    return report
