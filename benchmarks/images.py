"""Folders of photographs: other caches, further changes, and the memory of eight ranks."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from benchmarks.image_ways import IMAGES, arm, drawn
from benchmarks.race import Arm, race, refuse_other_work
from benchmarks.suite import Bar, Bench, Report, Row, compare
from ddpexp.data.image_folder.prepare import prepare

_REFERENCE = "DataLoader, 2 workers"  # the best number of workers on two cores, as `image_ways` shows
_WAYS: dict[str, tuple[str, ...]] = {
    "pixels": ("ddpexp",),
    "files in one file": ("ddpexp", "--cache", "jpeg"),
    "the files themselves": ("ddpexp", "--cache", "none"),
    "colors and RandAugment": ("ddpexp", "--changes"),
    "DataLoader": ("loader", "--workers", "0", "--epochs", "2"),
    _REFERENCE: ("loader", "--workers", "2", "--epochs", "2"),
}
_RANKS, _BATCH, _SIDE, _FEW = 8, 128, 32, 128


def run(bench: Bench) -> Report:
    number = 400 if bench.quick else IMAGES
    photos = drawn(bench.folder / "photos", number)
    arms = [arm(name, photos, *words) for name, words in _WAYS.items()]
    results = race(arms, bench.at_most(3), bench.folder, bench.say)
    refuse_other_work(results, "samples", 0)
    report = Report()
    for mine in [name for name in _WAYS if name != _REFERENCE]:
        what = f"samples a second, random resized crop to 224 and flip, {mine}, {_REFERENCE}"
        report.rows.append(
            compare(results, what, "rate", lambda value: f"{value:,.0f}", _REFERENCE, mine=mine, again=None)
        )
    report.rows.append(_memory(bench, photos, number))
    return report


def _memory(bench: Bench, photos: Path, number: int) -> Row:
    """Return how often the cache is in the memory of eight ranks: of all images more than of a few."""
    few = drawn(bench.folder / "few", _FEW)
    sizes = [_bytes(place) for place in (photos, few)]
    steps = -(-number // _BATCH)
    arms = [_eight(name, place, steps) for name, place in (("all", photos), ("few", few))]
    results = race(arms, bench.at_most(2), bench.folder / "memory", bench.say)
    refuse_other_work(results, "ranks", 0)
    pairs = zip(results["all"], results["few"], strict=True)
    copies = statistics.median((every["memory"] - some["memory"]) / (sizes[0] - sizes[1]) for every, some in pairs)
    bar, what = Bar("at most", 1.1), f"copies of {(sizes[0] - sizes[1]) / 1e6:.0f} MB of pixels in the memory of"
    return Row(f"{what} {_RANKS} ranks", f"{copies:.2f}", bar=f"{bar} copies", met=bar.met(copies))


def _bytes(photos: Path) -> int:
    """Prepare photographs; return the size of their pixels."""
    return (Path(prepare(str(photos), cache="raw", size=_SIDE, cache_size=256)["folder"]) / "train.bin").stat().st_size


def _eight(name: str, photos: Path, steps: int) -> Arm:
    def command(place: Path) -> list[str]:
        (place / "notes").mkdir()
        return [
            sys.executable, "-m", "ddpexp", "recipe=mnist", f"trainer.gpus={_RANKS}", "trainer.threads=1",
            "trainer.device=cpu", "run.trust=[benchmarks]", "task._target_=benchmarks.peers.memory.Weigh",
            f"+task.notes={place / 'notes'}", f"+task.steps={steps}", "model=linear",
            "model._target_=benchmarks.peers.memory.Net", "data=image_folder", f"data.root={photos}", "data.cache=raw",
            f"data.size={_SIDE}", "data.cache_size=256", "data.scale=[1.0,1.0]", f"trainer.global_batch_size={_BATCH}",
            "trainer.epochs=null", f"trainer.max_steps={steps}", "trainer.eval_every=0", "trainer.checkpoint_every=0",
            "logger=none", "scheduler=constant", f"run.dir={place / 'run'}",
        ]  # fmt: skip

    def figures(place: Path, _output: str, _begin: float, _end: float) -> dict[str, float]:
        notes = [int(path.read_text()) for path in (place / "notes").iterdir()]
        return {"ranks": len(notes), "memory": sum(notes)}

    return Arm(name, command, figures)
