"""What a step of trainer.reduction=exact costs against one of fast, with the same micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.race import Arm, race
from benchmarks.suite import Bench, Chart, Report, compare, mnist_words, of_rounds, records

_OFTEN = (
    "trainer.epochs=null",
    "trainer.eval_every=0",
    "trainer.checkpoint_every=0",
    "logger=none",
    "trainer.threads=1",
)


def run(bench: Bench) -> Report:
    def arm(name: str, reduction: str, words: Sequence[str]) -> Arm:
        def command(place: Path) -> list[str]:
            return mnist_words(bench.data, place / "run", *_OFTEN, *words, f"trainer.reduction={reduction}")

        def figures(place: Path, _output: str, _begin: float, _end: float) -> dict[str, float]:
            return {"ms": 128e3 / records(place / "run")[-1]["train/samples_per_second"]}

        return Arm(name, command, figures)

    report = Report()
    groups = {}
    for model, micro, number in (("lenet", 64, 200), ("lenet", 16, 200), ("linear", 64, 2000)):
        words = [
            f"model={model}",
            f"trainer.micro_batch_size={micro}",
            f"trainer.max_steps={number}",
            f"trainer.log_every={number // 2}",
        ]
        ways = {"ddpexp": "exact", "fast": "fast", "ddpexp again": "exact"}
        arms = [arm(name, way, words) for name, way in ways.items()]
        results = race(arms, bench.at_most(9), bench.folder / f"{model}-{micro}", bench.say)
        cut = f"{128 // micro} micro-batches of {micro}"
        what = f"a step of exact reduction, {model}, {cut}, 2 workers, against fast"
        report.rows.append(compare(results, what, "ms", lambda value: f"{value:.2f} ms", "fast"))
        groups[f"{model}, {cut}"] = of_rounds(results, "ms")
    report.charts.append(Chart("a step with exact and with fast reduction", "milliseconds", groups))
    return report
