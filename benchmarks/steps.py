"""The training step of a small network, a thread a rank, with records every 50 steps.

The saves of checkpoints are behind the timed part, what looks after them in every step is in it. Timed are the steps
from the first record to the last.
"""

from __future__ import annotations

from benchmarks.equal import PEERS, Job
from benchmarks.race import Figures, median
from benchmarks.suite import Bar, Bench, Chart, Report, Row, compare, of_rounds

_SHARE = 0.98  # of the hand-written loop's steps a second
_MICROSECONDS = 10.0
_STEPS = {1: 5000, 2: 3000}
_WORDS = ("trainer.threads=1", "trainer.checkpoint_every=1000000")


def run(bench: Bench) -> Report:
    report = Report()
    groups = {}
    for workers in (1,) if bench.quick else (1, 2):
        job = Job(bench, bench.folder / str(workers), "shallow", workers, _STEPS[workers])
        by_hand = {"by hand": ()} if workers == 1 else {"by hand": ("--reduce", "shared"), "by hand, DDP": ("--reduce", "tuned")}
        others = list(PEERS) if bench.peers is not None and not bench.quick else []
        arms = [job.ours("ddpexp", *_WORDS), *(job.by_hand(name, *words) for name, words in by_hand.items())]
        arms += [job.peer(name) for name in others]
        results = job.run([*arms, job.ours("ddpexp again", *_WORDS)], bench.rounds)
        for arm in arms[1:]:
            bar = Bar("at least", _SHARE) if arm.name == "by hand" else None
            note = "with the same reduction through shared memory" if workers > 1 and arm.name == "by hand" else ""
            what = f"steps a second, {workers} {'worker' if workers == 1 else 'workers'}, {arm.name}"
            report.rows.append(
                compare(results, what, "steps a second", lambda value: f"{value:,.0f}", arm.name, bar=bar, note=note)
            )
        if workers == 1:
            report.rows.append(_tax(results))
        groups[f"{workers} workers" if workers > 1 else "1 worker"] = of_rounds(results, "microseconds a step")
    report.charts.append(Chart("a step of 784-128-10, batch 32 a rank", "microseconds", groups))
    return report


def _tax(results: Figures) -> Row:
    """Say how much longer our step is than the hand-written loop's."""
    name, bar = "microseconds a step", Bar("at most", _MICROSECONDS)
    pairs = zip(results["ddpexp"], results["by hand"], strict=True)
    more = sorted(ours[name] - theirs[name] for ours, theirs in pairs)[len(results["ddpexp"]) // 2]
    shown = f"{median(results, 'ddpexp', name):.1f} against {median(results, 'by hand', name):.1f} us, {more:+.1f} us"
    return Row("a step more than the hand-written loop's, 1 worker", shown, bar=f"{bar} us", met=bar.met(more))
