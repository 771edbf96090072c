"""Measure the components of the step time on this machine.

Ordinary short runs, with one worker and with two, and their records.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ddpexp.config.schema import Experiment
from ddpexp.data.batch_plan import BatchPlan
from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.plan.speed import Costs, Measured, Place, fit, turns
from ddpexp.system.hardware import count_gpus, usable_core_numbers, usable_cores
from ddpexp.system.process import children, stat
from ddpexp.system.programs import python
from ddpexp.system.text import counted

_SECONDS = 2.0  # of training that a run is to take: cores are slowed by others' work for a second at a time
_FEWEST_STEPS, _MOST_STEPS = 36, 6000
_WINDOWS = 12  # records of a run, of which the first is left out
_BUSY = 0.1  # of the machine, above which others have disturbed the measurement
_SMALL = ("recipe=mnist", "model=linear", "data.source=embedded", "data.embedded_train=640", "data.embedded_test=10")
_SMALL_BYTES = 31_400  # of its gradients
_SMALL_STEPS = 2400
_ENDLESS_STEPS = 10_000_000
_STDERR = "stderr"  # the file for a run's standard error
_OF_THE_RUN = (
    "trainer.nodes=", "trainer.gpus=", "trainer.threads=", "trainer.global_batch_size=", "trainer.micro_batch_size=",
    "trainer.epochs=", "trainer.max_steps=", "trainer.log_every=", "trainer.eval_every=", "trainer.checkpoint_every",
    "trainer.keep_best=", "logger=", "logger.", "callbacks=", "callbacks.", "run.dir=", "run.resume=", "launcher",
)  # fmt: skip


@dataclass(frozen=True)
class Calibration:
    """What was fitted, what it was fitted to, and what is said of it."""

    costs: Costs
    measured: Measured
    small: Measured | None  # of a small model
    notes: tuple[str, ...]


def run_words(
    typed: Sequence[str], workers: int, passes: int, micro: int, threads: int, steps: int, log_every: int, folder: Path
) -> list[str]:
    """Return the words of a short run: those of the plan, with its length, its workers and its records changed."""
    kept = [word for word in typed if not word.lstrip("+").startswith(_OF_THE_RUN)]
    return [
        *kept, "launcher=spawn", "logger=none", "callbacks=none", f"run.dir={folder}", "run.resume=never",
        f"trainer.gpus={workers}",
        f"trainer.threads={threads}", f"trainer.micro_batch_size={micro}",
        f"trainer.global_batch_size={micro * passes * workers}",
        "trainer.epochs=null", f"trainer.max_steps={steps}", f"trainer.log_every={log_every}",
        "trainer.eval_every=0", "trainer.checkpoint_every=0", "trainer.checkpoint_every_seconds=null",
        "trainer.keep_best=null",
    ]  # fmt: skip


def step_ms(records: Sequence[Mapping[str, float]], global_batch_size: int) -> float:
    """Return the step time of a run: the lower quartile over its windows of records, without the first.

    Other programs on the machine make a window longer, never shorter. Units: milliseconds.
    """
    rates = [record["train/samples_per_second"] for record in records if "train/samples_per_second" in record]
    times = [1e3 * global_batch_size / rate for rate in rates[1:] or rates]
    return statistics.quantiles(times, n=4, method="inclusive")[0] if len(times) > 1 else times[0]


def calibrate(
    experiment: Experiment, typed: Sequence[str], batch: BatchPlan, layout: Layout, place: Place, num_bytes: int,
    report: Callable[[str], None],
) -> Calibration:  # fmt: skip
    """Run and fit. `num_bytes` are those of the gradients; `report` prints progress.

    Raises:
        RefusedError: this machine lacks the device, or a run failed.
    """
    gpus = count_gpus() if layout.device == "cuda" else 2
    if gpus == 0:
        raise RefusedError(
            "plan --calibrate measures on this machine, which shows no GPU",
            suggestion="Give --compute_ms, --alpha_us and --bandwidth_gbps.",
        )
    notes: list[str] = []
    two, on_cpu = layout.world_size > 1 and gpus > 1, layout.device == "cpu"
    if two and layout.nodes > 1:
        notes.append(
            "alpha and bandwidth are those between two workers of this machine, not of a network: type those of yours"
        )
    others = _Others()
    with tempfile.TemporaryDirectory(prefix="ddpexp-plan-") as name:
        by_backend = ["strategy.reduce_through=backend"] if on_cpu and place.way != "shared_memory" else []
        bench = _Bench(Path(name), [*typed, *by_backend], batch.micro_batch_size, layout.threads, place, report, others)
        bench = replace(bench, steps=num_steps(bench.measure(1)))
        measured, small = bench.measured(batch.gradient_accumulation_steps > 1, two, on_cpu), None
        if two and on_cpu and num_bytes > 4 * _SMALL_BYTES:
            bench = replace(bench, typed=[*_SMALL, *by_backend], steps=_SMALL_STEPS, name=" of a small model")
            small = bench.measured(False, True, False)
            small = replace(small, crowded=bench.measure(2, bench.fewer_cores()), crowded_turns=bench.fewer_turns())
    busy = others.share()
    if busy > _BUSY:
        notes.append(
            f"other programs took {busy:.0%} of this machine while it was measured: measure again when it is quiet"
        )
    if on_cpu and place.cores != usable_cores():
        notes.append(f"measured with the {usable_cores()} cores of this machine")
    return Calibration(fit(measured, small, num_bytes, _SMALL_BYTES, place), measured, small, tuple(notes))


@dataclass(frozen=True)
class _Bench:
    """Short runs, one after the other."""

    folder: Path
    typed: Sequence[str]
    micro: int
    threads: int
    place: Place
    report: Callable[[str], None]
    others: _Others
    steps: int = _FEWEST_STEPS
    name: str = ""

    def measured(self, twice: bool, two: bool, on_cpu: bool) -> Measured:
        """Measure a step in all the ways that the plan needs."""
        result = Measured(self.measure(1), self.measure(1, passes=2) if twice else None)
        if not two:
            return result
        if on_cpu and self.place.workers > 1 and usable_cores() >= 2 * self.threads:
            result = replace(result, beside=self.beside())
        result = replace(result, both=self.measure(2))
        if on_cpu and turns(self.place) > 1:
            result = replace(result, crowded=self.measure(2, self.fewer_cores()), crowded_turns=self.fewer_turns())
        return result

    def fewer_cores(self) -> list[int]:
        """Return cores on which two workers take turns as often as those of the plan."""
        cores = usable_core_numbers()
        wanted = round(2 * self.threads / turns(self.place))
        return cores[-max(1, min(wanted, len(cores))) :]

    def fewer_turns(self) -> float:
        """Return how often they take turns."""
        return max(1.0, 2 * self.threads / len(self.fewer_cores()))

    def measure(self, workers: int, cores: Sequence[int] = (), passes: int = 1) -> float:
        """Return the time of a step of one run, on some cores alone."""
        where = f" on {counted(len(cores), 'core')}" if cores else ""
        self.report(
            f"measuring {counted(workers, 'worker')}{where}, {passes} pass{'es' if passes > 1 else ''}{self.name}"
        )
        folder = self._folder()
        with _started(self._arguments(workers, passes, self.steps, folder), folder, cores) as run:
            _finish(run, folder)
        return step_ms(_records(folder / "run"), self.micro * passes * workers)

    def beside(self) -> float:
        """Return the time of a step of one worker while another run computes the same."""
        self.report(f"measuring 1 worker beside another run{self.name}")
        ours, theirs = self._folder(), self._folder()
        with _started(self._arguments(1, 1, _ENDLESS_STEPS, theirs), theirs) as neighbour:
            while not _records(theirs / "run") and neighbour.poll() is None:
                time.sleep(0.05)
            with _started(self._arguments(1, 1, self.steps, ours), ours) as run:
                _finish(run, ours)
            if neighbour.poll() is not None:
                _finish(neighbour, theirs)
            # This process does not wait for these.
            self.others.leave_out(sum(_seconds(pid) for pid in children(neighbour.pid)))
        return step_ms(_records(ours / "run"), self.micro)

    def _folder(self) -> Path:
        place = self.folder / f"{len(list(self.folder.iterdir()))}"
        place.mkdir()
        return place

    def _arguments(self, workers: int, passes: int, steps: int, folder: Path) -> list[str]:
        return run_words(
            self.typed,
            workers=workers,
            passes=passes,
            micro=self.micro,
            threads=self.threads,
            steps=steps,
            log_every=self.steps // _WINDOWS,
            folder=folder / "run",
        )


def num_steps(pilot_ms: float) -> int:
    """Return how many steps a run takes: about two seconds, a few dozen at least. Units: milliseconds."""
    steps = int(_SECONDS * 1e3 / max(pilot_ms, 1e-3))
    return max(_FEWEST_STEPS, min(_MOST_STEPS, steps)) // _WINDOWS * _WINDOWS


@contextmanager
def _started(arguments: Sequence[str], folder: Path, cores: Sequence[int] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run, on some cores alone, that ends with this process; stop it in the end if it still runs."""
    command = python("ddpexp.launch.workers.server:call_under", os.getpid(), "ddpexp.__main__:run", [], argv=arguments)
    with open(folder / _STDERR, "wb") as stderr:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)
    if cores:
        with suppress(ProcessLookupError):  # it has ended already
            os.sched_setaffinity(process.pid, cores)
    try:
        yield process
    finally:
        process.kill()  # its workers end with it, and what it leaves is in a folder of ours
        process.wait()


def _finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for a run.

    Raises:
        RefusedError: it failed.
    """
    if process.wait():
        lines = (folder / _STDERR).read_text(errors="replace").strip().splitlines()
        lines = lines or [f"exit code {process.returncode}"]
        raise RefusedError(f"A short run failed: {lines[-1].removeprefix('ddpexp: ')}", place="plan --calibrate")


def _records(folder: Path) -> list[dict[str, float]]:
    """Return what a run has recorded so far."""
    try:
        text = (folder / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


class _Others:
    """How busy other programs keep the machine."""

    def __init__(self) -> None:
        """Start measuring."""
        self._begin = time.monotonic(), _busy_seconds(), _own_seconds()
        self._left_out = 0.0

    def leave_out(self, seconds: float) -> None:
        """Do not count these seconds: they were used by processes of ours that this one does not wait for."""
        self._left_out += seconds

    def share(self) -> float:
        """Return the share of all cores that others have taken since then."""
        begin, busy, own_seconds = self._begin
        seconds = (time.monotonic() - begin) * (os.cpu_count() or 1)
        return max(0.0, (_busy_seconds() - busy - _own_seconds() + own_seconds - self._left_out) / seconds)


def _busy_seconds() -> float:
    """Return the seconds that all cores have computed. Source: proc(5), /proc/stat: the fourth and fifth are idle."""
    with open("/proc/stat") as file:
        ticks = list(map(int, file.readline().split()[1:9]))
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _seconds(pid: int) -> float:
    """Return the seconds that a process has computed, and what it has started."""
    fields = stat(pid)
    seconds = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") if fields else 0.0
    return seconds + sum(_seconds(child) for child in children(pid))


def _own_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
