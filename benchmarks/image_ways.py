"""Folders of photographs: samples a second, crop and flip, against torch's DataLoader over Pillow."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.race import Arm, last_json, median, race, refuse_other_work
from benchmarks.suite import Bar, Bench, Chart, Report, Row, compare, of_rounds

IMAGES, _CLASSES, _SIZE = 1000, 10, (500, 375)
_WAYS: dict[str, tuple[str, ...]] = {
    "ddpexp": ("ddpexp",),
    "gather by hand": ("gather",),
    "DataLoader, 1 worker": ("loader", "--workers", "1"),
    "DataLoader, 2 workers": ("loader", "--workers", "2"),
    "DataLoader, 4 workers": ("loader", "--workers", "4"),
    "ddpexp again": ("ddpexp",),
}
_LEAST_ROUNDS = 4  # first epochs differ more than anything else
_WITHIN = 0.05  # the largest difference of two runs of ddpexp for which a first epoch is valid
_QUICK = ("ddpexp", "gather by hand", "DataLoader, 2 workers", "ddpexp again")


def run(bench: Bench) -> Report:
    photos = drawn(bench.folder / "photos", 500 if bench.quick else IMAGES)
    names = [name for name in _WAYS if not bench.quick or name in _QUICK]
    arms = [arm(name, photos, *_WAYS[name]) for name in names]
    rounds = 3 if bench.quick else max(_LEAST_ROUNDS, bench.at_most(7))
    results = race(arms, rounds, bench.folder, bench.say)
    refuse_other_work(results, "samples", 0)
    loaders = [name for name in names if name.startswith("DataLoader")]
    best = max(loaders, key=lambda name: median(results, name, "rate"))
    report = Report()
    for other in [name for name in names if not name.startswith("ddpexp")]:
        bar = Bar("at least", 0.9) if other == "gather by hand" else Bar("at least", 4) if other == best else None
        what = f"samples a second, random resized crop to 224 and flip, {other}"
        report.rows.append(compare(results, what, "rate", lambda value: f"{value:,.0f}", other, bar=bar))
    first = min(loaders, key=lambda name: median(results, name, "first"))
    report.rows.append(
        compare(
            results, f"the first epoch, preparation included, {first}", "first", lambda value: f"{value:.2f} s", first,
            bar=Bar("at most", 1.0), within=_WITHIN,
        )
    )  # fmt: skip
    seek, limit = median(results, "ddpexp", "seek"), Bar("at most", 5)
    shown = f"{seek * 1e3:.2f} ms"
    report.rows.append(Row("position at 80 % of an epoch", shown, bar=f"{limit} ms", met=limit.met(seek * 1e3)))
    groups = {"rate": of_rounds(results, "rate")}
    report.charts.append(Chart("photographs, all cores, batches of 64", "samples a second", groups, log=True))
    return report


def arm(name: str, photos: Path, way: str, *more: str) -> Arm:
    """Return a program that reads the photographs, in a folder and with a cache of its own."""

    def command(place: Path) -> list[str]:
        copy = place / "photos"
        shutil.copytree(photos, copy, copy_function=os.link)
        return [sys.executable, "-m", "benchmarks.peers.images", "--way", way, "--folder", str(copy), *more]

    # Caches stay until the end: what is removed is discarded on the disk, which the next program would wait for.
    return Arm(name, command, lambda _place, output, _begin, _end: last_json(output))


def drawn(folder: Path, number: int) -> Path:
    """Draw photographs: smooth patches with noise, which take about as long to decode as real ones."""
    dice = np.random.default_rng(0)
    width, height = _SIZE
    for index in range(number):
        place = folder / f"class{index % _CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        patches = Image.fromarray(dice.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(patches.resize((width, height), Image.Resampling.BICUBIC)).astype(np.float32)
        noisy = (smooth + dice.normal(0, 8, (height, width, 1))).clip(0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(place / f"{index:05}.jpg", quality=90)
    return folder
