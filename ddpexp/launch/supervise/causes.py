"""Why ranks have failed: the cause of each, from its own report or its exit, and which of all is the genuine one."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddpexp.errors import EXIT_DONE, EXIT_FAILED, Failure, PeerError
from ddpexp.launch.supervise.stacks import Stack, raised, shown, threads
from ddpexp.launch.workers.lines import Lines
from ddpexp.launch.workers.page import Page
from ddpexp.launch.workers.rank_log import Log

_LAST_LINES = 20
_CRASH_LINES = 200  # more than libraries and Python print on a crash
_SIZE_MISMATCH = "op.preamble.length <= op.nbytes"  # gloo's message, after which it aborts the process
_MISMATCH = "CollectiveMismatch"


@dataclass
class Worker:
    """One rank, as its supervisor sees it."""

    rank: int
    control: Lines
    log: Log
    page: Page
    signals: socket.socket  # the numbers of the signals that it receives itself
    pid: int | None = None
    code: int | None = None  # exit code, or minus the signal's number
    done: bool = False
    stopped: bool = False  # it has exited by itself after a stop request
    ended: bool = False  # the supervisor killed it
    trains: bool = False  # its training has begun
    step: int | None = None
    failure: Failure | None = None
    killed_for: str | None = None  # the OOM verdict, where it was killed by SIGKILL
    failed_at: float = 0.0  # when the supervisor learnt of it
    dumps: int = 0  # SIGQUITs from the supervisor that it has not forwarded back yet

    @property
    def last_step(self) -> int | None:
        """Return the last known number of steps that it has done."""
        return self.step if self.page.status.step is None else self.page.status.step

    @property
    def well(self) -> bool:
        """Return whether it has ended without a failure: done, or stopped on request."""
        return (self.done and self.code == EXIT_DONE) or (self.stopped and self.code == 128 + signal.SIGTERM)


@dataclass
class ReportedFailure:
    """A failure that another command has reported."""

    failure: Failure
    weight: int
    at: float


def rank_causes(workers: Sequence[Worker], reported: Sequence[ReportedFailure], at_once: bool = False) -> list[Failure]:
    """Return all known failures, here and of other commands, the most genuine first.

    An unexpected death comes first, then a rank's own error; broken connections are usually consequences. `at_once`:
    the ranks were asked to exit without saving.
    """
    ended = [worker for worker in workers if worker.failure is not None or worker.code is not None]
    bad = [worker for worker in ended if not worker.well]
    ranked = [
        (
            3 if at_once and worker.failure is None else weight(cause_of(worker)),
            worker.failed_at,
            worker.rank,
            cause_of(worker),
        )
        for worker in bad  # a rank without an error of its own has exited as requested
    ]
    ranked += [(report.weight, report.at, report.failure.rank, report.failure) for report in reported]
    return [failure for *_, failure in sorted(ranked, key=lambda entry: entry[:3])]


def weight(failure: Failure) -> int:
    """Return how unlikely a failure is to be the original cause.

    0 a death, 1 a rank's own error, 2 a broken connection, 3 ended by the supervisor.
    """
    if failure.kind == "Ended":
        return 3
    if failure.signal is not None:
        return 1 if failure.signal == signal.SIGABRT else 0  # libraries abort when a connection breaks
    if failure.kind == PeerError.__name__:
        return 2
    text = failure.message.lower()
    of_torch = failure.kind in ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
    return (
        2
        if of_torch and any(word in text for word in ("gloo", "nccl", "connection closed", "connection reset", "store"))
        else 1
    )


def cause_of(worker: Worker) -> Failure:
    """Return the failure that the worker itself reported, or one derived from its exit."""
    if worker.failure is not None:
        return worker.failure
    code = worker.code if worker.code is not None else EXIT_FAILED
    if worker.ended:
        return failure_of(worker, "Ended", "ended because another rank failed")
    if code > 128:
        kind = signal.Signals(code - 128).name
        return failure_of(worker, kind, f"ended by {kind}, which did not come through the command", signum=code - 128)
    if code >= 0:
        message = f"the process ended with exit code {code} before its work was done"
        return failure_of(worker, "SystemExit", message, exit_code=code if 3 <= code <= 125 else EXIT_FAILED)
    kind = next((number.name for number in signal.Signals if number == -code), f"signal {-code}")
    if code == -signal.SIGABRT and _SIZE_MISMATCH in worker.log.last_lines(_CRASH_LINES):
        message = "it received data of another size than expected: the ranks call different collective operations"
        return failure_of(worker, _MISMATCH, message, signum=-code)
    why = f": {worker.killed_for}" if worker.killed_for else ""
    return failure_of(worker, kind, f"killed by {kind}{why}", signum=-code)


def is_mismatch(failure: Failure) -> bool:
    """Return whether ranks called different collective operations; the one that got data of another size has died."""
    return failure.kind == _MISMATCH


def locate_mismatch(failure: Failure, workers: Sequence[Worker]) -> Failure:
    """Add to a mismatch where each rank here was; the rank that was in the recipe's own code, if any, gets named."""
    stacks = {worker.rank: stack for worker in workers if (stack := _stack(worker))}
    frames = {rank: shown(stack) for rank, stack in stacks.items()}
    if failure.rank not in frames or len(frames) < 2:
        return failure
    rank = next((rank for rank, frame in frames.items() if not frame.is_ours), failure.rank)
    places = "; ".join(f"rank {number} {frame}" for number, frame in list(frames.items())[:8])
    message = (
        f"the ranks called different collective operations: {places}. Do all take the same path through the recipe?"
    )
    return replace(failure, rank=rank, message=message, traceback=None)


def _stack(worker: Worker) -> Stack:
    """Return the stack of a rank's error, or the last one that it dumped."""
    stack = raised((worker.failure and worker.failure.traceback) or "")
    return stack or next(reversed(threads(worker.log.last_lines(_CRASH_LINES))), [])


def failure_of(
    worker: Worker, kind: str, message: str, signum: int | None = None, exit_code: int = EXIT_FAILED
) -> Failure:
    """Return a failure of a rank as observed from outside, with the last lines of its log."""
    return Failure(
        rank=worker.rank,
        host=os.uname().nodename,
        kind=kind,
        message=message,
        step=worker.last_step,
        phase=worker.page.status.phase,
        signal=signum,
        traceback=worker.log.last_lines(_LAST_LINES),
        exit_code=exit_code,
    )


def log_failure(worker: Worker) -> None:
    """Append a rank's own error to its log; the terminal shows only the first cause."""
    if worker.failure is not None:
        worker.log.add(f"{worker.failure.traceback or ''}{worker.failure.kind}: {worker.failure.message}\n")
