"""Measure on this machine what a step's time is made of: ordinary short runs, with one worker and with two, and their records."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ddpexp.config import Experiment
from ddpexp.data.batch_plan import BatchPlan
from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.launch.hardware import count_gpus, usable_cores
from ddpexp.launch.limits import said_with_limit
from ddpexp.plan.speed import Costs, Measured, Place, fit_compute, fit_reduction

_PILOT_STEPS = 30
_SECONDS = 1.0  # of training that a run is to take
_FEWEST_STEPS, _MOST_STEPS = 36, 1200
_WINDOWS = 12  # records of a run, of which the first is left out
_BUSY = 0.1  # of the machine, above which others have disturbed the measurement
_SMALL = ("recipe=mnist", "model=linear", "data.source=embedded", "data.embedded_train=640", "data.embedded_test=10")
_SMALL_BYTES = 31_400  # of its gradients
_OF_THE_RUN = (
    "trainer.nodes=", "trainer.gpus=", "trainer.threads=", "trainer.global_batch_size=", "trainer.micro_batch_size=",
    "trainer.epochs=", "trainer.max_steps=", "trainer.log_every=", "trainer.eval_every=", "trainer.checkpoint_every",
    "trainer.keep_best=", "logger=", "logger.", "run.dir=", "run.resume=", "launcher",
)  # fmt: skip


@dataclass(frozen=True)
class Calibration:
    """What was fitted, what it was fitted to, and what is said of it."""

    costs: Costs
    measured: Measured
    small: tuple[float, float] | None  # a step of a small model, with one worker and with two. Units: milliseconds
    notes: tuple[str, ...]


def run_words(typed: Sequence[str], workers: int, passes: int, micro: int, threads: int, steps: int, folder: Path) -> list[str]:
    """Return the words of a short run: those of the plan, with its length, its workers and its records changed."""
    kept = [word for word in typed if not word.lstrip("+").startswith(_OF_THE_RUN)]
    return [
        *kept, "launcher=spawn", "logger=none", f"run.dir={folder}", "run.resume=never", f"trainer.gpus={workers}",
        f"trainer.threads={threads}", f"trainer.micro_batch_size={micro}", f"trainer.global_batch_size={micro * passes * workers}",
        "trainer.epochs=null", f"trainer.max_steps={steps}", f"trainer.log_every={max(1, steps // _WINDOWS)}",
        "trainer.eval_every=0", "trainer.checkpoint_every=0", "trainer.checkpoint_every_seconds=null", "trainer.keep_best=null",
    ]  # fmt: skip


def step_ms(records: Sequence[Mapping[str, float]], global_batch_size: int) -> float:
    """Return the time of a step in a run's records: the lower quartile of its windows, without the first. Units: milliseconds.

    What else runs on the machine makes a window longer, never shorter.
    """
    rates = [one["train/samples_per_second"] for one in records if "train/samples_per_second" in one]
    times = [1e3 * global_batch_size / rate for rate in rates[1:] or rates]
    return statistics.quantiles(times, n=4, method="inclusive")[0] if len(times) > 1 else times[0]


def calibrate(
    experiment: Experiment,
    typed: Sequence[str],
    batch: BatchPlan,
    layout: Layout,
    place: Place,
    num_bytes: int,
    say: Callable[[str], None],
) -> Calibration:
    """Run and fit. `num_bytes` are those of the gradients; `say` hears what is done.

    Raises:
        RefusedError: this machine lacks the device, or a run failed.
    """
    gpus = count_gpus() if layout.device == "cuda" else 2
    if gpus == 0:
        raise RefusedError(
            "plan --calibrate measures on this machine, which shows no GPU: give --compute_ms, --alpha_us and --bandwidth_gbps."
        )
    two = layout.world_size > 1 and gpus > 1
    micro, threads = batch.micro_batch_size, layout.threads
    notes: list[str] = []
    if place.way != "shared_memory" and layout.nodes > 1 and two:
        notes.append("alpha and bandwidth are those between two workers of this machine, not of a network: type those of yours")
    reduce = ["strategy.reduce_through=backend"] if place.way != "shared_memory" and layout.device == "cpu" else []
    others = _Others()
    with tempfile.TemporaryDirectory(prefix="ddpexp-plan-") as name:

        def measure(words: Sequence[str], workers: int, passes: int, steps: int) -> float:
            say(f"measuring {workers} worker{'s' if workers > 1 else ''}, {passes} pass{'es' if passes > 1 else ''} a step")
            folder = Path(name, f"{len(os.listdir(name))}")
            _run(run_words([*words, *reduce], workers, passes, micro, threads, steps, folder))
            records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            return step_ms(records, micro * passes * workers)

        steps = num_steps(measure(typed, 1, 1, _PILOT_STEPS))
        own = Measured(measure(typed, 1, 1, steps), measure(typed, 1, 2, steps))
        small = None
        if two:
            own = replace(own, both=measure(typed, 2, 1, steps), both_twice=measure(typed, 2, 2, steps))
            if num_bytes > 4 * _SMALL_BYTES and layout.device == "cpu":
                small = measure(_SMALL, 1, 1, _MOST_STEPS), measure(_SMALL, 2, 1, _MOST_STEPS)
    busy = others.share()
    if busy > _BUSY:
        notes.append(f"other programs took {busy:.0%} of this machine while it was measured: measure again when it is quiet")
    if layout.device == "cpu" and place.cores != usable_cores():
        notes.append(f"measured with the {usable_cores()} cores of this machine")
    return Calibration(fit(own, small, num_bytes, place), own, small, tuple(notes))


def fit(own: Measured, small: tuple[float, float] | None, num_bytes: int, place: Place) -> Costs:
    """Return the costs that the measured steps tell; without two workers nothing of the reduction."""
    each, update, slower, reduction = fit_compute(own)
    if own.both is None:
        return Costs(each, update)
    pair = replace(place, world_size=2, workers=2, way=place.way if place.way == "shared_memory" else "backend")
    less = None if small is None else (max(0.0, small[1] - slower * small[0]), _SMALL_BYTES)
    alpha, bandwidth = fit_reduction(reduction, num_bytes, less, pair)
    return Costs(each, update, alpha, bandwidth, slower)


def num_steps(pilot_ms: float) -> int:
    """Return how many steps a run takes: about a second, a few dozen at least. Units: milliseconds."""
    steps = int(_SECONDS * 1e3 / max(pilot_ms, 1e-3))
    return max(_FEWEST_STEPS, min(_MOST_STEPS, steps)) // _WINDOWS * _WINDOWS


def _run(words: Sequence[str]) -> None:
    command = [sys.executable, "-m", "ddpexp", *words]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise RefusedError(f"plan --calibrate: a short run could not be started: {said_with_limit(error)}.") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RefusedError(f"plan --calibrate: a short run failed ({' '.join(words)}): {lines[-1].removeprefix('ddpexp: ')}")


class _Others:
    """How busy the machine is with what is not ours."""

    def __init__(self) -> None:
        """Begin to look."""
        self._begin = time.monotonic(), _busy_seconds(), _own_seconds()

    def share(self) -> float:
        """Return the share of all cores that others have taken since then."""
        begin, busy, own = self._begin
        seconds = (time.monotonic() - begin) * (os.cpu_count() or 1)
        return max(0.0, (_busy_seconds() - busy - _own_seconds() + own) / seconds)


def _busy_seconds() -> float:
    """Return the seconds that all cores have computed. Source: proc(5), /proc/stat: the fourth and fifth are idle."""
    with open("/proc/stat") as file:
        ticks = list(map(int, file.readline().split()[1:9]))
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
