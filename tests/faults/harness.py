"""One fault in one run: put it there, wait for the end, and check what every end must show."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import PATIENCE, Done, ddpexp_processes, finish
from tests.points import Recipe, wait_for

_SECONDS = PATIENCE  # for what ends in well under five, on a machine that has nothing else to do


@dataclass(frozen=True)
class Ended:
    """How a run with a fault ended."""

    done: Done

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.done.run / "error.json").read_text())
        return found

    def failed(self, *, rank: int, code: int = 1, says: str = "", step: bool = True) -> dict[str, Any]:
        """Check that the run failed because of `rank`, and said so once: rank, host, step and cause in one line."""
        assert self.done.code == code, self.done.err
        error = self.error
        assert (error["rank"], self.done.result()["status"]) == (rank, "failed"), error
        lines = [line for line in self.done.err.splitlines() if re.match(r"ddpexp: rank \d+ on .* failed", line)]
        assert len(lines) == 1, self.done.err
        place = f" after step {error['step']}" if error["step"] is not None else ""
        assert lines[0].startswith(f"ddpexp: rank {rank} on {platform.node()} failed ({error['phase']}{place}): "), (
            lines
        )
        assert error["step"] is not None or not step
        assert re.search(says, lines[0]), lines
        assert re.search(says, f"{error['kind']}: {error['message']}"), error
        return error


class Running:
    """A run that trains, for faults that come from outside."""

    def __init__(self, recipe: Recipe, *overrides: str, environ: dict[str, str] | None = None, steps: int = 3) -> None:
        """Start it, and return when it has trained for some steps."""
        self.process, self.run = recipe.start(*overrides, environ=environ)
        if steps:
            wait_for(lambda: self.process.poll() is not None or trained(self.run, steps))

    def ended(self) -> Ended:
        """Wait for the end."""
        return Ended(finish(self.process, self.run))

    def pid(self, rank: int) -> int:
        """Return the process of a rank."""
        return pid_of(rank)


def trained(run: Path, steps: int) -> bool:
    """Return whether a run that records every step has come so far."""
    try:
        return len((run / "metrics.jsonl").read_text().splitlines()) >= steps
    except OSError:
        return False


def pid_of(rank: int) -> int:
    """Return the process of a rank on this host; only one run may be there."""
    found = processes_of(rank)
    return next(pid for pid, parent in found.items() if parent not in found)


def parent_of(pid: int) -> int:
    """Return the parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def loader_workers(rank: int) -> list[int]:
    """Return the DataLoader workers of a rank on this host; only one run may be there."""
    found = processes_of(rank)
    return sorted(pid for pid, parent in found.items() if parent in found)


def processes_of(rank: int) -> dict[int, int]:
    """Return the processes that write to a rank's log, each with its parent.

    Forks do not change what /proc calls environ.
    """
    found = {}
    for pid in ddpexp_processes():
        folder = Path("/proc") / str(pid)
        try:
            if (folder / "fd/1").readlink().name == f"{rank}.log":
                found[pid] = parent_of(pid)
        except OSError:
            continue
    return found


def faulted(recipe: Recipe, fault: str, *overrides: str, environ: dict[str, str] | None = None) -> Ended:
    """Run with an injected fault."""
    return Ended(recipe(*overrides, environ={"DDPEXP_FAULT": fault, **(environ or {})}))


def name(pid: int) -> str:
    """Return the name of a process as the kernel has it."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def gone(before: set[int], started: Sequence[subprocess.Popen[str]], what: str) -> float:
    """Wait until nothing new is alive and return how long that took."""
    begin = time.monotonic()
    while left := ddpexp_processes() - before:
        for one in started:
            one.poll()
        text = ", ".join(f"{name(pid)} {pid}" for pid in left)
        assert time.monotonic() - begin < _SECONDS, f"{what} leaves {text}"
        time.sleep(0.02)
    return time.monotonic() - begin


@contextmanager
def ended(before: set[int], *started: subprocess.Popen[str]) -> Iterator[None]:
    """Leave nothing of what was started behind, whatever the test finds."""
    try:
        yield
    finally:
        for pid in ddpexp_processes() - before:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for one in started:
            one.communicate()
