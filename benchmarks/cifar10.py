"""recipe=cifar10 on drawn pictures against a hand-written loop of the airbench kind, one worker with one thread.

With `--airbench DIR` against airbench94's own loop from its repository, too. Timed are the epochs after the first one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.race import Arm, last_json, race, refuse_other_work
from benchmarks.suite import Bar, Bench, Chart, Report, compare, of_rounds, records
from ddpexp.data.cifar10.prepare import prepare

_SAMPLES, _BATCH, _EPOCHS = 2048, 256, 4
_WIDTHS = {"a quarter of the width": (16, 64, 64), "an eighth of the width": (8, 32, 32)}


def run(bench: Bench) -> Report:
    report = Report()
    found = prepare(None, "embedded", embedded_train=_SAMPLES, embedded_test=16)
    groups = {}
    for name, width in list(_WIDTHS.items())[: 1 if bench.quick else 2]:
        peer = [
            sys.executable, "-m", "benchmarks.peers.cifar10", "--folder", found["folder"], "--width", *map(str, width),
            "--batch", str(_BATCH), "--epochs", str(_EPOCHS),
        ]  # fmt: skip
        by_hand = Arm("by hand", lambda _, words=peer: words, lambda _p, output, _b, _e: last_json(output))  # type: ignore[misc]
        arms = [_ours("ddpexp", width), by_hand, _ours("ddpexp again", width)]
        if bench.airbench is not None:
            arms.insert(2, _airbench(bench.airbench, found["folder"], width))
        results = race(arms, bench.at_most(3 if bench.quick else 7), bench.folder / str(width[0]), bench.say)
        refuse_other_work(results, "steps", 0)
        report.rows.append(
            compare(
                results, f"samples a second, {name}, batches of {_BATCH}, by hand", "rate",
                lambda value: f"{value:,.0f}", "by hand", bar=Bar("at least", 1.0),
            )
        )  # fmt: skip
        if bench.airbench is not None:
            report.rows.append(
                compare(
                    results, f"samples a second, {name}, batches of {_BATCH}, airbench94's own loop", "rate",
                    lambda value: f"{value:,.0f}", "airbench94", bar=Bar("at least", 1.0),
                )
            )  # fmt: skip
        groups[name] = of_rounds(results, "rate")
    report.charts.append(Chart("a loop of the airbench kind on one thread", "samples a second", groups))
    return report


def _airbench(repository: Path, folder: str, width: tuple[int, ...]) -> Arm:
    words = ["--repository", str(repository.resolve()), "--folder", str(Path(folder).resolve())]
    words += ["--width", *map(str, width), "--batch", str(_BATCH), "--epochs", str(_EPOCHS)]
    program = str(Path(__file__).parent / "peers/airbench.py")

    def command(place: Path) -> list[str]:
        return ["env", "-C", str(place), sys.executable, program, *words]  # it reads and writes in the current folder

    return Arm("airbench94", command, lambda _place, output, _begin, _end: last_json(output))


def _ours(name: str, width: tuple[int, ...]) -> Arm:
    per_epoch = _SAMPLES // _BATCH

    def command(place: Path) -> list[str]:
        return [
            sys.executable, "-m", "ddpexp", "recipe=cifar10", "data.source=embedded",
            f"data.embedded_train={_SAMPLES}", "data.embedded_test=16", f"model.widths=[{','.join(map(str, width))}]",
            "trainer.gpus=1", "trainer.device=cpu", "trainer.threads=1", "trainer.precision=fp32",
            f"trainer.global_batch_size={_BATCH}", f"trainer.epochs={_EPOCHS}", "trainer.eval_every=0",
            f"trainer.log_every={per_epoch}", f"run.dir={place / 'run'}",
        ]  # fmt: skip

    def figures(place: Path, _output: str, _begin: float, _end: float) -> dict[str, float]:
        lines = [line for line in records(place / "run") if "train/loss" in line or "loss" in line]
        first, last = lines[0], lines[-1]
        rate = (last["step"] - first["step"]) * _BATCH / (last["time"] - first["time"])
        return {"rate": rate, "steps": last["step"]}

    return Arm(name, command, figures)
