"""Text and tar shards: samples a second of one process, against nanoGPT's get_batch and the library webdataset."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.peers.nanogpt import parts
from benchmarks.race import Arm, last_json, median, race, refuse_other_work
from benchmarks.suite import Bar, Bench, Chart, Report, Row, compare, of_rounds

_SHARDS, _SAMPLES, _SIZE = 8, 256, 160
_BAR = Bar("at least", 1)


def run(bench: Bench) -> Report:
    report = Report()
    if bench.nanogpt is not None and bench.text is not None:
        train, _, _ = parts(bench.text.read_text(encoding="utf-8"))
        train.tofile(bench.folder / "train.bin")
        of_text = [
            _arm(name, way, bench.folder, "--source", str(bench.nanogpt))
            for name, way in (("ddpexp", "windows"), ("get_batch", "get_batch"), ("ddpexp again", "windows"))
        ]
        results = race(of_text, bench.at_most(7), bench.folder / "text", bench.say)
        refuse_other_work(results, "values", 0)
        refuse_other_work(results, "mean", 0.05)
        what = "windows of 64 characters a second, batches of 12, nanoGPT's get_batch"
        report.rows.append(compare(results, what, "rate", _shown, "get_batch", bar=_BAR))
        report.charts.append(Chart("windows of a text", "samples a second", {"": of_rounds(results, "rate")}))
    if bench.peers is None:
        return report
    pattern = _written(bench.folder / "shards")
    for workers in (0, 1):
        names = {"ddpexp": "shards", "webdataset": "webdataset", "ddpexp again": "shards"}
        arms = [
            _arm(name, way, pattern, "--workers", str(workers), python=bench.peers if way == "webdataset" else None)
            for name, way in names.items()
        ]
        results = race(arms, bench.at_most(5), bench.folder / f"shards-{workers}", bench.say)
        refuse_other_work(results, "values", 0)
        refuse_other_work(results, "mean", 0.02)
        loaders = f"{workers} DataLoader worker" if workers else "in the process itself"
        what = f"JPEGs of {_SIZE} x {_SIZE} a second from tar shards, {loaders}, webdataset"
        report.rows.append(compare(results, what, "rate", _shown, "webdataset", bar=_BAR))
        report.charts.append(Chart(f"tar shards, {loaders}", "samples a second", {"": of_rounds(results, "rate")}))
    resumed = median(results, "ddpexp", "resumed")
    report.rows.append(
        Row("opening indexed shards, and the first batch at 80 % of an epoch", f"{resumed * 1e3:.0f} ms")
    )
    return report


def _shown(value: float) -> str:
    return f"{value:,.0f}"


def _arm(name: str, way: str, path: Path | str, *more: str, python: str | None = None) -> Arm:
    words = [python or sys.executable, "-m", "benchmarks.peers.reading", "--way", way, "--path", str(path), *more]
    return Arm(name, lambda _: words, lambda _place, output, _begin, _end: last_json(output))


def _written(folder: Path) -> str:
    """Write shards of photographs; return their pattern."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    for shard in range(_SHARDS):
        with tarfile.open(folder / f"train-{shard:03}.tar", "w") as archive:
            for number in range(_SAMPLES):
                small = Image.fromarray(draw.integers(0, 256, (12, 12, 3), dtype=np.uint8))
                image = io.BytesIO()
                small.resize((_SIZE, _SIZE), Image.Resampling.BICUBIC).save(image, "JPEG", quality=90)
                for extension, data in (("jpg", image.getvalue()), ("cls", b"%d" % (number % 10))):
                    member = tarfile.TarInfo(f"{shard:03}{number:06}.{extension}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    return f"{folder}/train-*.tar"
