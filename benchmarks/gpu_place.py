"""Where the pieces of the benchmark on GPUs run, and the programs that they start there, which end in time."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from benchmarks.equal import RECIPE
from benchmarks.race import environ
from benchmarks.suite import ROOT
from ddpexp.data.adapters import MapStyle
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import TrainBatches
from ddpexp.system.process import stat

RARE = 1_000_000  # steps from one checkpoint to the next where none is wanted
_PR_SET_CHILD_SUBREAPER = 36
_TEXT = 1500  # characters that are kept of a program's output


class CutError(Exception):
    """The time was over before a program had ended."""


class Program:
    """A program, with everything that it starts, and its output."""

    def __init__(self, command: Sequence[str], own: Mapping[str, str], out: IO[str], err: IO[str]) -> None:
        """Start it; what it leaves behind becomes a child of this process."""
        self._others, self._files = set(descendants()), (out, err)
        _adopt(True)
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environ(own), stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True,
        )  # fmt: skip

    def wait(self, seconds: float) -> int | None:
        """Return the exit code; None if it still runs after so long."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(max(seconds, 0.0))
        return None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program itself."""
        os.kill(self._process.pid, number)

    def gone(self, seconds: float) -> float | None:
        """Return after how long nothing of it was left; None if something is after so long. Units: seconds."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            self._process.poll()
            if not self._running():
                return time.monotonic() - began
            time.sleep(0.005)
        return None

    def end(self) -> None:
        """Kill the program and everything that it has started."""
        while left := self._running():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self._process.wait()
        _adopt(False)

    def _running(self) -> set[int]:
        return set(descendants()) - self._others

    def output(self) -> tuple[str, str]:
        """Return what it has written to its output and to the stream for errors."""
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read())
        return texts[0], texts[1]

    def problem(self) -> str:
        """Return how it ended, with the end of what it wrote."""
        out, err = self.output()
        return f"exit code {self._process.poll()}: {(err.strip() or out.strip())[-_TEXT:]}"


def _written() -> IO[str]:
    return tempfile.TemporaryFile("w+", errors="replace")


def _adopt(orphans: bool) -> None:
    """Become the parent of processes below this one whose parent has ended, or stop it. Source: prctl(2)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0)


def descendants() -> list[int]:
    """Return the processes that this one has started, directly or not, and that still run.

    One whose first thread has ended looks dead, and is still the parent of its children while its other threads end.
    """
    processes = {int(name): stat(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    found, wave = list[int](), [os.getpid()]
    while wave:
        wave = [pid for pid, fields in processes.items() if fields is not None and int(fields[1]) in wave]
        found += wave
    return [pid for pid in found if (fields := processes[pid]) is not None and fields[0] != "Z"]


@dataclass(frozen=True)
class Place:
    """Where a piece runs, how large, and until when."""

    folder: Path  # scratch
    device: str  # cuda, or cpu to try every line without a GPU
    quick: bool  # tiny, and not compiled
    gpus: int
    end: float = float("inf")  # of time.monotonic()
    say: Callable[[str], None] = print

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.end - time.monotonic()

    @contextmanager
    def started(self, command: Sequence[str], **own: str) -> Iterator[Program]:
        """Start a program, which has ended with all that it started when the block ends."""
        hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if self.device == "cpu" else {}
        with _written() as out, _written() as err:
            program = Program(command, hidden | own, out, err)
            try:
                yield program
            finally:
                program.end()

    def run(self, command: Sequence[str], own: Mapping[str, str] = {}) -> str:
        """Run a program, with variables of its own, and return its output.

        Raises:
            CutError: it had not ended when the time was over.
            RuntimeError: its exit code was not 0.
        """
        with self.started(command, **own) as program:
            found = program.wait(self.left())
            if found is None:
                raise CutError
            if found != 0:
                raise RuntimeError(program.problem())
            return program.output()[0]

    def train(self, run: Path, *overrides: str, **own: str) -> dict[str, Any]:
        """Train in a run directory; return its result with the device of its workers.

        Raises:
            RuntimeError: it failed, or its workers had another device than they were to have.
        """
        self.run(self.command(run, *overrides), own=own)
        found: dict[str, Any] = json.loads((run / "result.json").read_text())
        device = json.loads((run / "manifest.json").read_text())["world"]["device"]
        if device != self.device:
            raise RuntimeError(f"manifest.json names the device {device}, not {self.device}")
        return found | {"device": device}

    def command(self, run: Path, *overrides: str) -> list[str]:
        """Return a run of ddpexp with one worker, unless the overrides have another number."""
        given = {override.partition("=")[0] for override in overrides}
        kind = ["trainer.precision=bf16"] if self.device == "cuda" else ["trainer.precision=fp32", "trainer.threads=1"]
        defaults = [
            "recipe=raced", f"trainer.device={self.device}", "trainer.gpus=1", *kind,
            f"trainer.checkpoint_every={RARE}", f"run.dir={run}",
        ]  # fmt: skip
        defaults = [override for override in defaults if override.partition("=")[0] not in given]
        return [sys.executable, "-m", "ddpexp", "--config-dir", RECIPE, *defaults, *overrides]

    def images(self, shape: tuple[int, ...]) -> Path:
        """Write random images once, brighter the higher the label: something to learn."""
        if self.quick:
            shape = (256, shape[1], *((28, 28) if shape[1] == 1 else (16, 16)))
        count = shape[0]
        folder = self.folder / f"images-{'x'.join(map(str, shape[1:]))}"
        if folder.exists():
            return folder
        folder.mkdir(parents=True)
        draw = np.random.default_rng(0)
        for part, number in (("train", count), ("test", 128)):
            labels = draw.integers(0, 10, number)
            noise = draw.integers(0, 148, (number, *shape[1:]), dtype=np.uint8)
            np.save(folder / f"{part}-images.npy", noise + (12 * labels).astype(np.uint8).reshape(-1, 1, 1, 1))
            np.save(folder / f"{part}-labels.npy", labels)
        return folder

    def order(self, samples: int, batch: int, steps: int) -> Path:
        """Write which samples ddpexp takes in each step, for the loop by hand."""
        path = self.folder / f"order-{samples}-{batch}-{steps}.npy"
        plan = plan_batches(batch, "auto", 1)
        rows = TrainBatches(MapStyle(range(samples)), plan, 0, 0, torch.device("cpu")).indices(0, steps)
        np.save(path, np.stack(list(rows)))
        return path
