"""Data that fits into memory.

Samples a second of a rank, and the memory of eight, against loops by hand and DataLoaders.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import numpy as np

from benchmarks.race import Arm, Figures, last_json, race, refuse_other_work
from benchmarks.starting import started
from benchmarks.suite import Bar, Bench, Chart, Report, Row, compare, of_rounds

_SHAPES = {"60,000 x 28 x 28": (60_000, 28, 28), "50,000 x 3 x 32 x 32": (50_000, 3, 32, 32)}
_WAYS = {
    "ddpexp": ["--way", "ddpexp", "--epochs", "15"],
    "gather by hand": ["--way", "gather", "--epochs", "15"],
    "DataLoader": ["--way", "loader"],
    "DataLoader, 2 workers": ["--way", "loader", "--workers", "2"],
    "TensorDataset": ["--way", "tensors"],
    "ddpexp again": ["--way", "ddpexp", "--epochs", "15"],
}
_QUICK = ("ddpexp", "gather by hand", "DataLoader", "ddpexp again")
_RANKS, _STEPS = 8, 48


def run(bench: Bench) -> Report:
    report = Report()
    groups = {}
    for size, shape in list(_SHAPES.items())[: 1 if bench.quick else 2]:
        folder = _written(bench.folder / size.replace(" ", "").replace(",", ""), shape)
        for augment in [False, True] if len(shape) == 4 else [False]:
            what = f"{size}, {'mirrored, cut and normalised' if augment else 'normalised'}"
            results = _race(bench, folder, augment)
            report.rows += [
                compare(
                    results, f"samples a second, {what}, {other}", "rate", lambda value: f"{value:,.0f}", other,
                    bar=Bar("at least", 0.9) if other == "gather by hand" else None,
                )
                for other in results if not other.startswith("ddpexp")
            ]  # fmt: skip
            groups[what] = of_rounds(results, "rate")
        if len(shape) == 4:
            report.rows += _memory(bench, folder, shape)
    report.charts.append(Chart("one rank on one thread, batches of 128", "samples a second", groups, log=True))
    return report


def _race(bench: Bench, folder: Path, augment: bool) -> Figures:
    def arm(name: str) -> Arm:
        typed = [*_WAYS[name], "--folder", str(folder), *(["--augment"] if augment else [])]
        words = [sys.executable, "-m", "benchmarks.peers.input", *typed]
        return Arm(name, lambda _: words, lambda _place, output, _begin, _end: last_json(output))

    names = [name for name in (_QUICK if bench.quick else _WAYS) if not (augment and name == "TensorDataset")]
    place = bench.folder / f"{folder.name}-{augment}"
    results = race([arm(name) for name in names], bench.at_most(3 if bench.quick else 7), place, bench.say)
    for figure in ("samples", "different"):
        refuse_other_work(results, figure, 0)
    # Not mirrored, the left half would have twice the right half's brightness. What is dropped at an epoch's end
    # differs.
    for half in ("left", "right"):
        refuse_other_work(results, half, 0.01 if augment else 1e-4)
    return results


def _memory(bench: Bench, folder: Path, shape: tuple[int, ...]) -> list[Row]:
    few = _written(bench.folder / "few", (2048, *shape[1:]))
    arms = [
        _eight(name, way, data) for way in ("ddpexp", "by hand") for name, data in ((way, folder), (f"{way} few", few))
    ]
    results = race(arms, bench.at_most(3), bench.folder / "memory", bench.say)
    refuse_other_work(results, "ranks", 0)
    more = _bytes(folder) - _bytes(few)

    def copies(way: str) -> float:
        pairs = zip(results[way], results[f"{way} few"], strict=True)
        return statistics.median((many["memory"] - fewer["memory"]) / more for many, fewer in pairs)

    ours, theirs, bar = copies("ddpexp"), copies("by hand"), Bar("at most", 1.1)
    what = f"copies of {more / 1e6:.0f} MB of images in the memory of {_RANKS} ranks, by hand each its own"
    return [
        Row(what, f"{ours:.2f} against {theirs:.2f}", f"{ours / theirs:.3f}", bar=f"{bar} copies", met=bar.met(ours)),
        compare(
            results, f"all memory of these {_RANKS} ranks", "memory", lambda value: f"{value / 1e6:,.0f} MB", "by hand"
        ),
    ]


def _eight(name: str, way: str, data: Path) -> Arm:
    def command(place: Path) -> list[str]:
        (place / "notes").mkdir()
        if way == "by hand":
            program = [
                "-m",
                "benchmarks.peers.memory",
                "--folder",
                str(data),
                "--steps",
                str(_STEPS),
                "--notes",
                str(place / "notes"),
            ]
            return started("torchrun", _RANKS, program, ours=False)
        return [
            sys.executable, "-m", "ddpexp", "recipe=mnist", f"trainer.gpus={_RANKS}", "trainer.threads=1",
            "trainer.device=cpu",
            "run.trust=[benchmarks]", "task._target_=benchmarks.peers.memory.Weigh", f"+task.notes={place / 'notes'}",
            f"+task.steps={_STEPS}", "model=linear", "model._target_=benchmarks.peers.memory.Net", "data=images",
            f"data.root={data}", f"trainer.global_batch_size={128 * _RANKS}", "trainer.epochs=null",
            f"trainer.max_steps={_STEPS}", "trainer.eval_every=0", "trainer.checkpoint_every=0",
            "logger=none", "scheduler=constant", f"run.dir={place / 'run'}",
        ]  # fmt: skip

    def figures(place: Path, _output: str, _begin: float, _end: float) -> dict[str, float]:
        notes = [int(path.read_text()) for path in (place / "notes").iterdir()]
        return {"ranks": len(notes), "memory": sum(notes)}

    return Arm(name, command, figures)


def _written(folder: Path, shape: tuple[int, ...]) -> Path:
    """Write random images, the right half of each half as bright, in files; a label is its image's number."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for part, count in (("train", shape[0]), ("test", 128)):
        images = draw.integers(0, 256, (count, *shape[1:]), dtype=np.uint8)
        images[..., shape[-1] // 2 :] //= 2
        np.save(folder / f"{part}-images.npy", images)
        np.save(folder / f"{part}-labels.npy", np.arange(count))
    return folder


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("train-*.npy"))
