"""Layers that several workers compute one behind the other, or together, against torch's own tools for both."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.equal import RECIPE
from benchmarks.race import Arm, Figures, quartiles, race
from benchmarks.suite import Bar, Bench, Report, Row, records

_WORKERS = 4
_BLOCK = 10  # steps
_SHARE = 0.95
_TOLERANCE = 0.05  # of the loss: the batches are others
_PIPELINE = ("strategy=pipeline", f"strategy.pp_size={_WORKERS}", "trainer.micro_batch_size=2")
KINDS = {
    "1f1b": ("a pipeline, 1F1B", 1, _PIPELINE),
    "gpipe": ("a pipeline, GPipe", 1, (*_PIPELINE, "strategy.schedule=gpipe")),
    "interleaved": (
        "a pipeline, 2 stages on each worker", 2,
        (*_PIPELINE, "strategy.schedule=interleaved", "strategy.stages_per_worker=2"),
    ),
    "tensor": ("tensor parallelism", 1, ("strategy=fsdp", f"strategy.tp_size={_WORKERS}")),
}  # fmt: skip
"""What is raced: what it is called, stages of a worker, and the overrides."""


def run(bench: Bench) -> Report:
    """Train with ddpexp and with torch's tools in the same processes, in blocks of steps in turn."""
    kinds = ["1f1b", "tensor"] if bench.quick else list(KINDS)
    turns = max(2, min(bench.rounds, 15))
    arms = [_arm(kind, turns) for kind in kinds]
    found = race(arms, 1, bench.folder, bench.say)
    return Report(rows=[_row(kind, bench.folder / f"{kind}-0", found) for kind in kinds])


def _arm(kind: str, turns: int) -> Arm:
    _, stages, words = KINDS[kind]
    steps = (turns + 2) * _BLOCK  # the first block warms up, the second is the first to be timed

    def command(place: Path) -> list[str]:
        callback = {"_target_": "layers.InTurn", "what": kind, "stages_per_rank": stages, "folder": place}
        callback["block"] = _BLOCK
        turn = [f"+callbacks.turn.{key}={value}" for key, value in callback.items()]
        return [
            sys.executable, "-m", "ddpexp", "--config-dir", RECIPE, "recipe=layers", f"run.dir={place / 'run'}",
            f"trainer.gpus={_WORKERS}", "trainer.threads=1", f"trainer.max_steps={steps}", "trainer.log_every=20",
            "trainer.checkpoint_every=0", *words, *turn,
        ]  # fmt: skip

    def figures(place: Path, _output: str, _begin: float, _end: float) -> dict[str, float]:
        blocks = _blocks(place)
        loss = [line["train/loss"] for line in records(place / "run") if "train/loss" in line][-1]
        theirs = blocks[-1]["loss"]
        if abs(loss - theirs) > _TOLERANCE * theirs:
            raise RuntimeError(f"{kind}: the loss is {loss}, and that of torch's loop {theirs}")
        return {name: statistics.median(block[name] for block in blocks) for name in ("ours", "theirs")}

    return Arm(kind, command, figures)


def _row(kind: str, place: Path, found: Figures) -> Row:
    blocks, [figures] = _blocks(place), found[kind]
    share = quartiles([block["theirs"] / block["ours"] for block in blocks])
    again = quartiles([second["ours"] / first["ours"] for first, second in pairwise(blocks)])
    bar = Bar("at least", _SHARE)
    return Row(
        f"steps a second, {KINDS[kind][0]}, {_WORKERS} workers of 1 thread, torch.distributed's own",
        f"{1 / figures['ours']:.1f} against {1 / figures['theirs']:.1f}",
        str(share), str(again), str(bar), bar.met(share.median), value=share.median,
    )  # fmt: skip


def _blocks(place: Path) -> Sequence[dict[str, float]]:
    return [json.loads(line) for line in (place / "blocks.jsonl").read_text().splitlines()]
