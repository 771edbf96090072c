"""The training step of a small network, a thread a rank, with records every 50 steps.

The saves of checkpoints are behind the timed part, what looks after them in every step is in it. Timed are the steps
from the first record to the last.

The programs' processes differ in speed by more than what is looked for (see A/A), so at one worker both loops also
train in one process, blocks of 100 steps in turn.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from benchmarks.equal import PEERS, Job, fastest
from benchmarks.race import Figures, quartiles
from benchmarks.suite import Bar, Bench, Chart, Report, Row, compare, of_rounds

_SHARE = 0.98  # of the hand-written loop's steps a second
_MICROSECONDS = 10.0
_STEPS = {1: 5000, 2: 3000}
_RECORDS = (
    "a record is four scalars, the norm of the gradient, a line for people, each in its file at once; by hand "
    "one scalar"
)
_WORDS = ("trainer.threads=1", "trainer.checkpoint_every=1000000")


def run(bench: Bench) -> Report:
    report = Report()
    groups = {}
    for workers in (1,) if bench.quick else (1, 2):
        job = Job(bench, bench.folder / str(workers), "shallow", workers, _STEPS[workers])
        if workers == 1:
            report.rows += _in_turn(job, bench.rounds, note=_RECORDS)
        if bench.quick:
            break
        by_hand = (
            {"by hand": ()}
            if workers == 1
            else {"by hand": ("--reduce", "shared"), "by hand, DDP": ("--reduce", "tuned")}
        )
        arms = [job.ours("ddpexp", *_WORDS), *(job.by_hand(name, *words) for name, words in by_hand.items())]
        results = job.run([*arms, job.ours("ddpexp again", *_WORDS)], bench.rounds)
        for arm in arms[1:]:
            bar = Bar("at least", _SHARE) if arm.name == "by hand" else None
            note = fastest(results, arm.name) if bar is not None else ""
            note += "; it has the same reduction through shared memory" if workers > 1 and bar is not None else ""
            report.rows.append(_steps(results, workers, arm.name, bar, note))
        if workers == 1:
            report.rows += _in_turn(
                job, bench.rounds, "trainer.log_every=1000000", name=", without records of ours", bars=False
            )
        peers = job.run_peers(list(PEERS), _WORDS)
        report.rows += [_steps(peers, workers, name) for name in peers if name != "ddpexp"]
        figure = "microseconds a step"
        groups[f"{workers} workers" if workers > 1 else "1 worker"] = of_rounds(peers, figure) | of_rounds(
            results, figure
        )
    report.charts += [Chart("a step of 784-128-10, batch 32 a rank", "microseconds", groups)] if groups else []
    return report


def _steps(results: Figures, workers: int, other: str, bar: Bar | None = None, note: str = "") -> Row:
    what = f"steps a second, {workers} {'worker' if workers == 1 else 'workers'}, {other}"
    return compare(results, what, "steps a second", lambda value: f"{value:,.0f}", other, bar=bar, note=note)


def _in_turn(job: Job, rounds: int, *words: str, name: str = "", bars: bool = True, note: str = "") -> list[Row]:
    """Compare with the hand-written loop within one process, where the machine's noise is the same for both."""
    apart = replace(job, folder=job.folder / f"turn-{len(words)}", steps=6000)
    found = apart.run([apart.in_turn("in turn", *_WORDS, *words)], rounds)["in turn"]
    middle = {figure: statistics.median(row[figure] for row in found) for figure in found[0]}
    share, again, more = (quartiles([row[figure] for row in found]) for figure in ("share", "again", "more"))
    least, most = Bar("at least", _SHARE), Bar("at most", _MICROSECONDS)
    return [
        Row(
            f"steps a second, 1 worker, in one process with by hand{name}",
            f"{1e6 / middle['ours']:,.0f} against {1e6 / middle['theirs']:,.0f}",
            str(share),
            str(again),
            str(least) if bars else "",
            least.met(share.median) if bars else None,
            note,
            share.median if bars else None,
        ),
        Row(
            f"a step more than by hand, in one process{name}",
            f"{more.median:+.1f} us ({more.low:+.1f} to {more.high:+.1f})",
            bar=f"{most} us" if bars else "",
            met=most.met(more.median) if bars else None,
        ),
    ]
