"""Small models on one host: ddpexp's defaults against DDP's over gloo, and a loop with one flat all-reduce and no DDP.

Ranks that reduce nothing show how much of DDP's step there is to win on the machine.
"""

from __future__ import annotations

from benchmarks.equal import Job, fastest
from benchmarks.race import ratio
from benchmarks.suite import Bar, Bench, Chart, Report, compare, of_rounds

_TIMES = {("deep", 2): 4.0, ("deep", 4): 6.0, ("lenet", 2): 1.3, ("lenet", 4): 1.8}
_NAMES = {"deep": "MLP of 63,370 parameters", "lenet": "LeNet"}
_FLOOR = "no reduction"  # ranks that train each for itself, by hand
_STEPS = {"deep": 1000, "lenet": 500}


def run(bench: Bench) -> Report:
    report = Report()
    groups = {}
    for (model, workers), times in _TIMES.items():
        if bench.quick and (model, workers) != ("deep", 2):
            continue
        job = Job(bench, bench.folder / f"{model}-{workers}", model, workers, _STEPS[model])
        arms = [
            job.ours("ddpexp", "trainer.threads=1"),
            job.by_hand("DDP", "--reduce", "ddp"),
            # With four ranks its sum has another order, whose last bits grow to more than a race allows.
            *([job.by_hand("flat all-reduce", "--reduce", "flat")] if workers == 2 and not bench.quick else []),
            *([] if bench.quick else [job.by_hand(_FLOOR, "--reduce", "none")]),
            job.ours("ddpexp again", "trainer.threads=1"),
        ]
        results = job.run(arms, bench.rounds, floor=_FLOOR)
        for arm in arms[1:-1]:
            what = f"steps a second, {_NAMES[model]}, {workers} workers, {arm.name}"
            bar, note = None, ""
            if arm.name == "DDP":
                bar = Bar("at least", times)
                note = fastest(results, "DDP")
                if not bench.quick:
                    note += f"; without any reduction: {ratio(results, _FLOOR, 'DDP', 'steps a second').median:.1f}"
            report.rows.append(
                compare(results, what, "steps a second", lambda value: f"{value:,.0f}", arm.name, bar=bar, note=note)
            )
        groups[f"{_NAMES[model]}, {workers} workers"] = of_rounds(results, "microseconds a step")
    report.charts.append(Chart("a step on one host of two cores, batch 32 a rank", "microseconds", groups))
    return report
