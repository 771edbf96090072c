"""Profile steps with torch.profiler: for each rank a trace with named phases, and a table of the top operators."""

from __future__ import annotations

import errno
import gzip
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.autograd.profiler import profile, record_function

from ddpexp.distributed.phases import DATA, PHASES
from ddpexp.distributed.times import NOWHERE
from ddpexp.settings.profile import KEY, MOST_STEPS, StepWindow
from ddpexp.system import files
from ddpexp.system.limits import reason_with_limit
from ddpexp.system.text import counted
from ddpexp.train.memory_snapshot import StepSnapshot
from ddpexp.train.metrics import Clock
from ddpexp.train.run import TrainingRun

_TOP = 50  # operators in a table
_COLLECTIVE = "reduction"  # the name of a collective in a trace
_NEVER = 1 << 62
_LOG = logging.getLogger("ddpexp")


class Profiler:
    """Profiles the steps of `trainer.profile`, and those that a person requests of the running run.

    Ranks: all, each method after the same step. What it does between two steps counts in no clock, and changes no bit.
    """

    def __init__(self, run: TrainingRun, clock: Clock) -> None:
        """Write into the directory of the run."""
        self._world = run.world
        self._control = run.control
        self._clock = clock
        self._run = run.directory
        typed, step = run.options.profile, run.options.memory_snapshot
        self._typed = None if typed is None else StepWindow.parse(typed)
        self._snapshot = StepSnapshot(run.directory, run.world.rank, step if isinstance(step, int) else None)
        self._window: StepWindow | None = None  # in progress
        self._ranges: _Ranges | None = None
        self._profile: profile | None = None

    def next_after(self, step: int) -> int:
        """Return the next step after which something begins or ends. Units: steps done."""
        steps = [_NEVER, self._snapshot.next_after(step)]
        if self._window is not None:
            steps.append(self._window.end)
        elif self._typed is not None and step < self._typed.begin:
            steps.append(self._typed.begin)
        return min(filter(None, steps))

    def say_if_past(self, step: int) -> None:
        """Log the steps of the window that the run has done before it resumed: they are not profiled."""
        run, typed = self._run, self._typed
        if run is None or typed is None or step <= typed.begin or not self._world.is_rank_zero:
            return
        if step < typed.end:
            _LOG.info(f"{KEY}={typed.begin}:{typed.end}: the run resumes after step {step}, and profiles from there")
        elif not run.profile(typed.begin).exists():
            _LOG.info(f"{KEY}={typed.begin}:{typed.end}: not profiled, since the run resumes after step {step}")

    def begin(self, step: int, requested: int = 0, num_steps: int = _NEVER) -> None:
        """Begin what is to be profiled after this step. Ranks: all; communicates if there is anything.

        `requested`: the number of steps, within the run. A profile in progress is extended to the last requested step.
        """
        self._snapshot.begin(step)
        ends = [min(step + requested, num_steps)] if requested else []
        if self._typed is not None and self._typed.begin <= step < self._typed.end:
            ends.append(self._typed.end)
        if self._run is None or not ends:
            return
        if self._window is not None:
            begin, end = self._window
            self._window = StepWindow(begin, min(max(end, *ends), begin + MOST_STEPS))
            return
        self._window = StepWindow(step, max(ends))
        with self._pause():
            if self._world.is_rank_zero:
                _remove_old(self._run.profile(step))
            self._profile = _started(self._world.device)
        self._ranges = _Ranges(step)
        self._world.times.observe(self._ranges)

    def end(self, step: int, early: bool = False) -> None:
        """Write the profile whose last step this is, or, `early`, whose last step this has become."""
        self._snapshot.end(step)
        window, profiled, ranges, run = self._window, self._profile, self._ranges, self._run
        if window is None or profiled is None or ranges is None or run is None or (step < window.end and not early):
            return
        window, folder = StepWindow(window.begin, step), run.profile(window.begin)
        self._window = self._profile = self._ranges = None
        self._world.times.observe(None)
        ranges.end()
        with self._pause():
            profiled.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            is_written = self._write(profiled, folder)
            missing = int(self._world.sum(torch.tensor([not is_written], dtype=torch.int64, device=self._world.device)))
        if self._world.is_rank_zero:
            self._control.send("profiled", begin=window.begin, end=window.end, missing=missing)
            if missing < self._world.world_size:
                _LOG.info(_said(window, folder, missing))

    def discard(self) -> None:
        """Stop a profile in progress, and write nothing: the run ends, and a resume profiles its steps again."""
        if self._profile is None:
            return
        self._world.times.observe(None)
        with suppress(RuntimeError):  # what ends the run may have broken the device
            self._profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._world.is_rank_zero:
            _LOG.info("the profile in progress is not written: the run ends within its steps")
        self._window = self._profile = self._ranges = None

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Count the time inside nowhere. Ranks: all; they leave it together, so that none waits later for another."""
        phase = self._control.status.phase
        with self._clock.stopped(), self._world.times.apart(NOWHERE):
            self._control.status.set_phase("profile")
            self._world.barrier()
            yield
            self._world.barrier()
        self._control.status.set_phase(phase)

    def _write(self, profiled: profile, folder: Path) -> bool:
        """Write this rank's files; return whether that worked. A profile never ends a run."""
        rank = self._world.rank
        trace, raw = folder / f"rank{rank}.trace.json.gz", folder / f".rank{rank}.trace.json"
        partial = trace.with_name(f".{trace.name}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            profiled.export_chrome_trace(str(raw))  # type: ignore[no-untyped-call]
            if not raw.exists():  # torch only logs that
                raise OSError(errno.ENOSPC, "torch could not write it all; the disk may be full")
            with raw.open("rb") as source, gzip.open(partial, "wb", compresslevel=5) as target:
                # What tells tools that read the traces of all ranks which one this is.
                place = {"rank": rank, "world_size": self._world.world_size}
                begin, brace, rest = source.read(64).partition(b"{")
                target.write(begin + brace + f'"distributedInfo": {json.dumps(place)},'.encode() + rest)
                shutil.copyfileobj(source, target)
            partial.rename(trace)
            files.write(folder / f"rank{rank}.operators.txt", _tables(profiled, self._world.device))
        except (OSError, RuntimeError) as error:
            why = reason_with_limit(error, folder) if isinstance(error, OSError) else str(error)
            _LOG.warning(f"the profile of rank {rank} cannot be written: {why}")
            return False
        finally:
            for path in (raw, raw.with_name(f"{raw.name}.tmp"), partial):
                with suppress(OSError):
                    path.unlink()
        return True


class _Ranges:
    """Marks steps and phases in a trace, as they begin and end."""

    def __init__(self, step: int) -> None:
        """Begin after a step, with the data of the next one."""
        self._step = step
        self._of_step: record_function | None = None
        self._of_phase: record_function | None = None
        self._of_collective: record_function | None = None

    def begin_phase(self, phase: int) -> None:
        """End the phase before it; each step begins with its data."""
        self._end_phase()
        if phase == DATA:
            self._end_step()
            self._step += 1
            self._of_step = _entered(f"ProfilerStep#{self._step}")  # the name that tools for traces know
        self._of_phase = _entered(PHASES[phase])

    def begin_collective(self) -> None:
        """Begin a collective in the phase."""
        self.end_collective()
        self._of_collective = _entered(_COLLECTIVE)

    def end_collective(self) -> None:
        """End the collective, if one is in progress."""
        if self._of_collective is not None:
            self._of_collective.__exit__(None, None, None)
            self._of_collective = None

    def end(self) -> None:
        """End everything."""
        self._end_phase()
        self._end_step()

    def _end_phase(self) -> None:
        self.end_collective()
        if self._of_phase is not None:
            self._of_phase.__exit__(None, None, None)
            self._of_phase = None

    def _end_step(self) -> None:
        if self._of_step is not None:
            self._of_step.__exit__(None, None, None)
            self._of_step = None


def _started(device: torch.device) -> profile:
    """Start to profile. Not by `torch.profiler`, which imports torch's compiler for it: that takes seconds."""
    is_gpu = device.type == "cuda"
    if not is_gpu:  # there its warnings may say why a trace lacks the kernels
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    profiled = profile(use_device="cuda" if is_gpu else None, use_kineto=True)
    profiled.__enter__()  # type: ignore[no-untyped-call]
    return profiled


def _entered(name: str) -> record_function:
    named = record_function(name)
    named.__enter__()  # type: ignore[no-untyped-call]
    return named


def _tables(profiled: profile, device: torch.device) -> str:
    """Return the operators that took most, by their own time on the CPU and on the GPU."""
    averages = profiled.key_averages()  # type: ignore[no-untyped-call]
    orders = {"on the CPU": "self_cpu_time_total"}
    if device.type == "cuda":
        orders = {"on the GPU": "self_device_time_total", **orders}
    tables = [
        f"Operators by their own time {where}\n\n"
        + averages.table(sort_by=order, row_limit=_TOP, max_name_column_width=80)
        for where, order in orders.items()
    ]
    return "\n\n".join(tables)


def _remove_old(folder: Path) -> None:
    """Remove the files of an earlier start, which may have had more ranks."""
    with suppress(OSError):
        for path in (*folder.glob("rank*.trace.json.gz"), *folder.glob("rank*.operators.txt")):
            path.unlink()


def _said(window: StepWindow, folder: Path, missing: int) -> str:
    lacks = f", without those of {counted(missing, 'rank')}" if missing else ""
    return (
        f"profile of {window}: {files.typed(folder)}{lacks}. Open rank0.trace.json.gz at https://ui.perfetto.dev or "
        "chrome://tracing; rank0.operators.txt lists the operators that took most"
    )
