"""One GPU: ResNet-18 on CIFAR-shaped images and a small network, against a loop by hand with the same switches.

bf16, compiled, the samples in the GPU's memory; both loops in one process, blocks of steps in turn.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.equal import RECIPE, turns
from benchmarks.peers.job import EVERY
from benchmarks.race import Arm, quartiles, race, refuse_other_work
from benchmarks.suite import Bar, Bench, Chart, Report, Row, records
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import TrainBatches

_TOLERANCE = 0.05  # of the loss at the end: bf16 and atomic sums make no run the same as another
_BLOCK = 100
_BAR = Bar("at least", 0.98)


@dataclass(frozen=True)
class _Job:
    what: str
    model: str
    shape: tuple[int, ...]
    batch: int
    steps: int
    channels_last: bool


_JOBS = (
    _Job("ResNet-18, 50,000 x 3 x 32 x 32, batch 512, channels-last", "resnet18", (50_000, 3, 32, 32), 512, 2000, True),
    _Job("784-128-10, 60,000 x 28 x 28, batch 128", "shallow", (60_000, 1, 28, 28), 128, 10_000, False),
)


def run(bench: Bench) -> Report:
    report = Report()
    groups = {}
    for job in _JOBS:
        found = _rounds(job, bench)
        share, again, more = (quartiles([row[figure] for row in found]) for figure in ("share", "again", "more"))
        ours, theirs = (statistics.median(row[figure] for row in found) for figure in ("ours", "theirs"))
        figures = f"{1e6 / ours:,.0f} against {1e6 / theirs:,.0f}; {more.median:+.1f} us a step"
        met, note = _BAR.met(share.median), torch.cuda.get_device_name() if torch.cuda.is_available() else "on the CPU"
        report.rows.append(
            Row(
                f"steps a second, {job.what}, by hand",
                figures,
                str(share),
                str(again),
                str(_BAR),
                met,
                note,
                share.median,
            )
        )
        groups[job.what] = {
            name: [row[key] for row in found] for name, key in (("ddpexp", "ours"), ("by hand", "theirs"))
        }
    report.charts.append(Chart("a step on one GPU, bf16, compiled", "microseconds", groups, log=True))
    return report


def _rounds(job: _Job, bench: Bench) -> list[dict[str, float]]:
    folder = bench.folder / job.model
    _write(folder, job.shape)
    plan = plan_batches(job.batch, "auto", 1)
    order = TrainBatches(range(job.shape[0]), plan, 0, 0, torch.device("cpu")).indices(0, job.steps)
    np.save(folder / "order.npy", np.stack(list(order)))

    def command(place: Path) -> list[str]:
        told = {"data": folder, "order": folder / "order.npy", "folder": place, "model": job.model, "block": _BLOCK}
        told["channels_last"] = job.channels_last
        return [
            sys.executable, "-m", "ddpexp", "--config-dir", RECIPE, "recipe=raced", "data=images",
            f"data.root={folder}",
            f"model.name={job.model}", f"trainer.global_batch_size={job.batch}", f"trainer.max_steps={job.steps}",
            f"trainer.log_every={EVERY}", f"run.dir={place / 'run'}", "trainer.gpus=1", "data.on_device=true",
            "trainer.precision=bf16", "trainer.compile=true", f"trainer.channels_last={job.channels_last}",
            "trainer.checkpoint_every=1000000", "task._target_=raced.InTurnOnDevice",
            *(f"+task.{key}={value}" for key, value in told.items()),
        ]  # fmt: skip

    def figures(place: Path, _output: str, _begin: float, _end: float) -> dict[str, float]:
        loss, theirs = (
            records(place / "run")[-1]["train/loss"],
            json.loads((place / "by_hand.json").read_text())["loss"],
        )
        refuse_other_work({"ddpexp": [{"loss": loss}], "by hand": [{"loss": theirs}]}, "loss", _TOLERANCE)
        return {**turns(place), "loss": loss}

    return race([Arm("in turn", command, figures)], bench.at_most(7), folder / "rounds", bench.say)["in turn"]


def _write(folder: Path, shape: tuple[int, ...]) -> None:
    """Write random images in files, brighter the higher the label: something to learn."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for part, count in (("train", shape[0]), ("test", 128)):
        labels = draw.integers(0, 10, count)
        noise = draw.integers(0, 148, (count, *shape[1:]), dtype=np.uint8)
        np.save(folder / f"{part}-images.npy", noise + (12 * labels).astype(np.uint8).reshape(-1, 1, 1, 1))
        np.save(folder / f"{part}-labels.npy", labels)
