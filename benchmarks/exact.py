"""What a step of trainer.reduction=exact costs beside one of fast, with the same micro-batches.

Of CPU time, as ranks that share cores wait longer than they work. All ways train in one process, blocks in turn.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.exact import WAYS
from benchmarks.race import Arm, Figures, last_json, race
from benchmarks.starting import started
from benchmarks.suite import Bench, Chart, Report, compare, of_rounds

_MODELS = {"deep": "MLP of 63,370 parameters", "lenet": "LeNet", "gpt": "GPT of two layers"}
_WITHIN = 0.02  # what the same way may differ by from itself
_ROUNDS = 3
# Freed memory stays with the process, as with ddpexp's workers. Otherwise glibc returns more of it in the steps of one
# model than in those of another one in the same process: page faults of up to a fifth of LeNet's step.
_KEPT = {f"MALLOC_{name}_": str(1 << 30) for name in ("TRIM_THRESHOLD", "MMAP_THRESHOLD", "TOP_PAD")}


def run(bench: Bench) -> Report:
    report = Report()
    groups = {}
    for workers in (2, 4):
        for model, name in _MODELS.items():
            for number in (1, 4):
                results = _in_turn(bench, model, workers, number)
                what = f"{name}, {workers} workers, {number} micro-batch{'es' if number > 1 else ''} of 32 each"
                report.rows.append(
                    compare(
                        results, f"a step of exact reduction, {what}, against fast", "us",
                        lambda value: f"{value:,.0f} µs", "fast", within=_WITHIN,
                    )
                )  # fmt: skip
                groups[what] = of_rounds(results, "us")
    report.charts.append(Chart("CPU time of a step with exact and with fast reduction", "microseconds", groups))
    return report


def _in_turn(bench: Bench, model: str, workers: int, number: int) -> Figures:
    def command(_place: Path) -> list[str]:
        program = ["-m", "benchmarks.peers.exact", "--model", model, "--micro-batches", str(number)]
        return started("torchrun", workers, program, ours=False)

    arm = Arm("in turn", command, lambda _place, output, _begin, _end: last_json(output), _KEPT)
    rounds = race([arm], bench.at_most(_ROUNDS), bench.folder / f"{model}-{workers}-{number}", bench.say)["in turn"]
    names = dict(zip(WAYS, ("ddpexp", "fast", "ddpexp again"), strict=True))
    return {name: [{"us": row[way]} for row in rounds] for way, name in names.items()}
