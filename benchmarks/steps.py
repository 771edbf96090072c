"""The training step of a small network, a thread a rank, with records every 50 steps.

The saves of checkpoints are behind the timed part, what looks after them in every step is in it. Timed are the steps
from the first record to the last.

The programs' processes differ in speed by more than what is looked for (see A/A); `fixed_cost` trains both in one.
"""

from __future__ import annotations

from benchmarks.equal import PEERS, Job, fastest
from benchmarks.race import Figures
from benchmarks.suite import Bar, Bench, Chart, Report, Row, compare, of_rounds

_SHARE = 0.98  # of the hand-written loop's steps a second
_STEPS = {1: 5000, 2: 3000}
_WORDS = ("trainer.threads=1", "trainer.checkpoint_every=1000000")


def run(bench: Bench) -> Report:
    report = Report()
    groups = {}
    for workers in (1, 2):
        job = Job(bench, bench.folder / str(workers), "shallow", workers, _STEPS[workers])
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
