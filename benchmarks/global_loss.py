"""A loss over the global batch in two passes, against the same two passes in a `train_step` written by hand.

Both, and the first once more, take steps of one run, in a shuffled order. Timed is rank zero's CPU time of a step.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from benchmarks.equal import RECIPE
from benchmarks.race import Arm, quartiles, race
from benchmarks.suite import Bar, Bench, Report, Row

_BLOCK = 20  # steps of each way
_MICRO_BATCHES = 4
_MOST = 1.02  # of the CPU time by hand


def run(bench: Bench) -> Report:
    report = Report()
    for workers in (1,) if bench.quick else (1, 2):
        arm = _arm(workers, 3 * _BLOCK * (bench.rounds + 1))
        race([arm], 1, bench.folder, bench.say)
        file = bench.folder / f"{arm.name}-0" / "blocks.jsonl"
        blocks = [json.loads(line) for line in file.read_text().splitlines()][1:]
        ratio = quartiles([block["built in"] / block["by hand"] for block in blocks])
        again = quartiles([block["again"] / block["built in"] for block in blocks])
        ours, theirs = (1e3 * statistics.median(block[way] for block in blocks) for way in ("built in", "by hand"))
        what = f"{'1 worker' if workers == 1 else f'{workers} workers'} of {_MICRO_BATCHES} micro-batches"
        bar = Bar("at most", _MOST)
        figures = f"{ours:.2f} ms against {theirs:.2f} ms"
        report.rows.append(
            Row(
                f"CPU time of a step, {what}, by hand",
                figures,
                str(ratio),
                str(again),
                str(bar),
                bar.met(ratio.median),
                value=ratio.median,
            )
        )
    return report


def _arm(workers: int, steps: int) -> Arm:
    def command(place: Path) -> list[str]:
        return [
            sys.executable, "-m", "ddpexp", "--config-dir", RECIPE, "recipe=contrast", f"run.dir={place / 'run'}",
            f"trainer.gpus={workers}", "trainer.threads=1", f"trainer.max_steps={steps}", "trainer.log_every=1000000",
            "trainer.checkpoint_every=0", f"trainer.micro_batch_size={256 // workers // _MICRO_BATCHES}",
            f"task.folder={place}", f"task.block={_BLOCK}",
        ]  # fmt: skip

    return Arm(f"workers-{workers}", command, lambda _place, _output, begin, end: {"seconds": end - begin})
