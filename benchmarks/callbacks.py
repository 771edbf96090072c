"""What callbacks cost a step: the loop's own calls for them, a million times, without the rest of a step.

Timed is what `Loop` does in every step, with members that have nothing to do in it. The fastest round counts,
for other work on the machine only adds to it.
"""

from __future__ import annotations

import json
import sys
import timeit
from types import SimpleNamespace
from typing import Any

from benchmarks.race import Arm, last_json, race
from benchmarks.suite import Bar, Bench, Report, Row

_CALLS = 1_000_000
_LIMITS = {"none": 0.2, "early_stopping": 1.0, "lr_monitor": 1.0, "both": 1.0}


def run(bench: Bench) -> Report:
    def arm(name: str) -> Arm:
        words = [sys.executable, "-m", "benchmarks.callbacks", name]
        return Arm(name, lambda _: words, lambda _folder, output, _start, _end: last_json(output))

    arms = [arm(name) for name in _LIMITS]
    results = race(arms, bench.at_most(5), bench.folder, bench.say)
    report = Report()
    for name, limit in _LIMITS.items():
        value = min(figures["microseconds"] for figures in results[name])
        bar = Bar("at most", limit)
        what = "without callbacks" if name == "none" else f"with {name}" if name != "both" else "with both of them"
        report.rows.append(Row(what, f"{value:.3f} µs a step", bar=f"{bar} µs", met=bar.met(value), value=value))
    return report


def measured(name: str) -> float:
    """Return what a step spends on callbacks. Units: microseconds."""
    from ddpexp.train.callbacks.base import RunView
    from ddpexp.train.callbacks.early_stopping import EarlyStopping
    from ddpexp.train.callbacks.hooks import Callbacks
    from ddpexp.train.callbacks.lr_monitor import LRMonitor

    every: dict[str, Any] = {"early_stopping": EarlyStopping(), "lr_monitor": LRMonitor()}
    callbacks = Callbacks(every if name == "both" else {key: every[key] for key in every if key == name})
    nothing: Any = None
    state: Any = SimpleNamespace(step=51)
    run: Any = SimpleNamespace(
        options=SimpleNamespace(log_every=50), num_steps=10**6, train=SimpleNamespace(steps_per_epoch=468),
        optimizers={},
    )  # fmt: skip
    callbacks.view = RunView(run, callbacks.requests, nothing, state, nothing, nothing, {})

    loop = SimpleNamespace(callbacks=callbacks)

    def calls() -> None:  # as in Step.apply, Loop._train_step and Loop._poll
        if loop.callbacks.on_gradients:
            loop.callbacks.call_on_gradients(())
        if loop.callbacks.on_step:
            loop.callbacks.call("on_step", loop.callbacks.on_step)
        if loop.callbacks.failed:
            raise AssertionError

    def nothing_at_all() -> None:
        pass

    with_it = min(timeit.repeat(calls, number=_CALLS, repeat=3))
    without = min(timeit.repeat(nothing_at_all, number=_CALLS, repeat=3))
    return (with_it - without) / _CALLS * 1e6


if __name__ == "__main__":
    print(json.dumps({"microseconds": measured(sys.argv[1])}))
