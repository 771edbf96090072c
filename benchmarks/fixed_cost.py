"""The fixed cost of a step: that of a small network on one thread, beside a hand-written loop in the same process.

Before or after every 100 steps, as chance has it, the other loop takes 100 of its own; *again* is a block of ddpexp
against the next one.
"""

from __future__ import annotations

import statistics

from benchmarks.equal import Job
from benchmarks.race import quartiles
from benchmarks.suite import Bar, Bench, Report, Row

_SHARE = 0.98  # of the hand-written loop's steps a second
_MICROSECONDS = 10.0
_RECORDS = (
    "a record is four scalars and the norm of the gradient, times and memory, a line for people, each in its file at "
    "once; by hand one scalar"
)
_WORDS = ("trainer.threads=1", "trainer.checkpoint_every=1000000")


def run(bench: Bench) -> Report:
    job = Job(bench, bench.folder / "steps", "shallow", 1, 6000)
    rows = _rows(job, bench.rounds, name=", a record every 50 steps", note=_RECORDS)
    if not bench.quick:
        job = Job(bench, bench.folder / "alone", "shallow", 1, 6000)
        rows += _rows(job, bench.rounds, "trainer.log_every=1000000", name=", records off")
    return Report(rows)


def _rows(job: Job, rounds: int, *words: str, name: str, note: str = "") -> list[Row]:
    found = job.run([job.in_turn("in turn", *_WORDS, *words)], rounds)["in turn"]
    middle = {figure: statistics.median(row[figure] for row in found) for figure in found[0]}
    share, again, more = (quartiles([row[figure] for row in found]) for figure in ("share", "again", "more"))
    least, most = Bar("at least", _SHARE), Bar("at most", _MICROSECONDS)
    return [
        Row(
            f"steps a second, by hand{name}",
            f"{1e6 / middle['ours']:,.0f} against {1e6 / middle['theirs']:,.0f}",
            str(share),
            str(again),
            str(least),
            least.met(share.median),
            note,
            share.median,
        ),
        Row(
            f"a step more than by hand{name}",
            f"{more.median:+.1f} us ({more.low:+.1f} to {more.high:+.1f})",
            bar=f"{most} us",
            met=most.met(more.median),
        ),
    ]
