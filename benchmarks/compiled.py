"""Steps with `trainer.compile_step` against hand-written loops without compilation, in CPU time and with one thread.

Each program takes blocks of its own steps and of a hand-written loop's, which is there twice, in a random order within
one process. Of each, the mean of the lower half of its blocks counts: what other programs disturbed the least. A row is
valid where the two hand-written loops, whose mean is taken, differ by at most 2 %.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.equal import RECIPE, Job
from benchmarks.peers.job import EVERY
from benchmarks.race import Arm, Figures, median, quartiles, race, refuse_other_work
from benchmarks.suite import Bar, Bench, Report, Row, records

_SHARE = Bar("at most", 0.9)  # of the hand-written loop's time
_WITHIN = 0.02
_WAYS = {"ddpexp": (), "ddpexp, compiled steps": ("trainer.compile_step=true",)}
_SAMPLES, _TOKEN_BATCH = 512, 8
_EQUAL = 1e-3  # by how much last losses may differ, relatively
_WORDS = ("trainer.threads=1", "trainer.checkpoint_every=1000000")


@dataclass(frozen=True)
class _Raced:
    """A model, how many blocks each loop takes, and of how many steps."""

    title: str
    model: str
    blocks: int
    block: int
    bar: Bar | None

    @property
    def steps(self) -> int:
        return self.blocks * self.block


_MODELS = (
    _Raced("784-128-10, batch 128", "shallow", 50, 100, _SHARE),
    _Raced("a GPT of six layers, batch 8 x 64", "six", 25, 4, _SHARE),
    _Raced("LeNet, batch 128", "lenet", 25, 8, None),
)


def run(bench: Bench) -> Report:
    report = Report()
    for raced in _MODELS:
        found = _gpt(bench, raced) if raced.model == "six" else _images(bench, raced)
        report.rows += [_row(found, raced, name) for name in _WAYS]
    return report


def _images(bench: Bench, raced: _Raced) -> Figures:
    job = Job(bench, bench.folder / raced.model, raced.model, 1, raced.steps, batch=128)

    def arm(name: str, words: Sequence[str]) -> Arm:
        ours = job.ours(name, *_WORDS, *words)

        def command(place: Path) -> list[str]:
            told = {"data": bench.data, "order": job.order, "folder": place, "model": raced.model, "block": raced.block}
            return [*ours.command(place), *_callback("ImageBlocks", told)]

        def figures(place: Path, output: str, begin: float, end: float) -> dict[str, float]:
            found = ours.figures(place, output, begin, end)
            return {"loss": found["loss"], "moved": found["moved"], **_times(place)}

        return Arm(name, command, figures)

    return job.run([arm(name, words) for name, words in _WAYS.items()], bench.at_most(3))


def _gpt(bench: Bench, raced: _Raced) -> Figures:
    folder = bench.folder / raced.model
    folder.mkdir()
    order = folder / "order.npy"
    np.save(order, np.random.default_rng(0).integers(0, _SAMPLES, (raced.steps, _TOKEN_BATCH)))
    told = {"order": order, "size": raced.model, "samples": _SAMPLES, "block": raced.block}

    def arm(name: str, words: Sequence[str]) -> Arm:
        def command(place: Path) -> list[str]:
            return [
                sys.executable, "-m", "ddpexp", "--config-dir", RECIPE, "recipe=raced", f"run.dir={place / 'run'}",
                "model=gpt", f"model.size={raced.model}", "data=tokens", f"data.size={raced.model}",
                f"data.samples={_SAMPLES}", "optimizer=adamw", "optimizer.lr=0.0003", "optimizer.betas=[0.9,0.95]",
                "optimizer.weight_decay=0.1", "trainer.param_groups=[{ndim:[0,1],weight_decay:0.0}]",
                f"trainer.global_batch_size={_TOKEN_BATCH}", f"trainer.max_steps={raced.steps}",
                f"trainer.log_every={EVERY}", "trainer.gpus=1", "trainer.device=cpu", "task._target_=raced.NextToken",
                *_WORDS, *words, *_callback("TokenBlocks", {**told, "folder": place}),
            ]  # fmt: skip

        def figures(place: Path, _output: str, _begin: float, _end: float) -> dict[str, float]:
            return {"loss": records(place / "run")[-1]["train/loss"], **_times(place)}

        return Arm(name, command, figures)

    found = race([arm(name, words) for name, words in _WAYS.items()], bench.at_most(3), folder, bench.say)
    refuse_other_work(found, "loss", _EQUAL)
    return found


def _callback(kind: str, told: Mapping[str, object]) -> list[str]:
    keys = {"_target_": f"raced.{kind}", **told}
    return [f"+callbacks.blocks.{key}={value}" for key, value in keys.items()]


def _times(place: Path) -> dict[str, float]:
    """Return the microseconds of a step of each loop, and what they are of the hand-written one's."""
    blocks: dict[str, list[float]] = {}
    for line in (place / "blocks.jsonl").read_text().splitlines():
        name, seconds = json.loads(line)
        blocks.setdefault(name, []).append(1e6 * seconds)
    # The first blocks load code, and compile.
    ours, theirs, again = (
        statistics.fmean(sorted(blocks[name][2:])[: len(blocks[name]) // 2 - 1])
        for name in ("ddpexp", "by hand", "by hand again")
    )
    both = (theirs + again) / 2
    return {"ours": ours, "theirs": both, "share": ours / both, "again": again / theirs}


def _row(found: Figures, raced: _Raced, name: str) -> Row:
    share, again = (quartiles([row[figure] for row in found[name]]) for figure in ("share", "again"))
    ours, theirs = (median(found, name, figure) for figure in ("ours", "theirs"))
    bar, note = (raced.bar if name != "ddpexp" else None), ""
    if abs(again.median - 1) > _WITHIN:
        bar, note = None, f"invalid: the A/A differs by more than {_WITHIN:.0%}"
    met = None if bar is None else bar.met(share.median)
    if met is False:
        note = "matrix products take most of a step, and are the same in both"
    return Row(
        f"a step of {raced.title}, {name}, by hand", f"{ours:,.0f} us against {theirs:,.0f} us of CPU time",
        str(share), str(again), str(bar or ""), met, note, None if bar is None else share.median,
    )  # fmt: skip
