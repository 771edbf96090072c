"""Why ranks have ended: what each has said itself or its end tells, and which of all causes is the genuine one."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddpexp.errors import EXIT_DONE, EXIT_FAILED, Failure, PeerError
from ddpexp.launch.supervise.stacks import Stack, raised, shown, threads
from ddpexp.launch.workers.control import Lines, SharedStatus
from ddpexp.launch.workers.rank_log import Log

_LAST_LINES = 20
_CRASH_LINES = 200  # more than a library and Python write of a crash
_OTHER_SIZE = "op.preamble.length <= op.nbytes"  # gloo's words, and with them it aborts the process
_MISMATCH = "CollectiveMismatch"


@dataclass
class Worker:
    """One rank as seen from outside."""

    rank: int
    control: Lines
    log: Log
    status_page: SharedStatus
    signals: socket.socket  # what it gets itself
    pid: int | None = None
    code: int | None = None  # exit code, or minus the signal's number
    done: bool = False
    stopped: bool = False  # it has left by itself, as it was asked to
    ended: bool = False  # by us
    trains: bool = False  # or did
    step: int | None = None
    failure: Failure | None = None
    killed_for: str | None = None  # what the kernel has counted, where it was killed by SIGKILL
    failed_at: float = 0.0  # when the watcher heard of it
    dumps: int = 0  # SIGQUITs from here that it has not passed on yet

    @property
    def last_step(self) -> int | None:
        """Return the steps that it had done when it was last heard of."""
        return self.step if self.status_page.step is None else self.status_page.step

    @property
    def well(self) -> bool:
        """Tell whether it has ended as it should."""
        return (self.done and self.code == EXIT_DONE) or (self.stopped and self.code == 128 + signal.SIGTERM)


@dataclass
class Heard:
    """A failure that another command has reported."""

    failure: Failure
    weight: int
    at: float


def rank_causes(workers: Sequence[Worker], heard: Sequence[Heard], at_once: bool = False) -> list[Failure]:
    """Return what is known of failures here and elsewhere, the most genuine first.

    A death that nobody asked for comes first, then a rank's own error; broken connections are mostly consequences.
    `at_once`:
    the ranks were asked to leave with nothing saved.
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
        for worker in bad  # one without an error of its own that was to leave did as it was told
    ]
    ranked += [(one.weight, one.at, one.failure.rank, one.failure) for one in heard]
    return [found for *_, found in sorted(ranked, key=lambda one: one[:3])]


def weight(failure: Failure) -> int:
    """Return how far a failure is from being the cause of all.

    0 a death, 1 an error of its own, 2 a broken connection, 3 by us.
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
    """Return what the worker itself said, or what its end tells."""
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
    kind = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    if code == -signal.SIGABRT and _OTHER_SIZE in worker.log.last_lines(_CRASH_LINES):
        message = "it received data of another size than expected: the ranks call different collective operations"
        return failure_of(worker, _MISMATCH, message, signum=-code)
    why = f": {worker.killed_for}" if worker.killed_for else ""
    return failure_of(worker, kind, f"killed by {kind}{why}", signum=-code)


def is_mismatch(failure: Failure) -> bool:
    """Tell whether ranks called different collective operations; whichever got data of another size has died of it."""
    return failure.kind == _MISMATCH


def with_places(failure: Failure, workers: Sequence[Worker]) -> Failure:
    """Say of a mismatch where each rank here was, and name the one that was in code of the recipe's own.

    If there is one.
    """
    stacks = {worker.rank: stack for worker in workers if (stack := _stack(worker))}
    frames = {rank: shown(stack) for rank, stack in stacks.items()}
    if failure.rank not in frames or len(frames) < 2:
        return failure
    rank = next((rank for rank, frame in frames.items() if not frame.is_ours), failure.rank)
    places = "; ".join(f"rank {number} {frame}" for number, frame in list(frames.items())[:8])
    message = (
        f"the ranks called different collective operations: {places}. Do all take the same way through the recipe?"
    )
    return replace(failure, rank=rank, message=message, traceback=None)


def _stack(worker: Worker) -> Stack:
    """Return where a rank was when it failed, or wrote its stack last."""
    found = raised((worker.failure and worker.failure.traceback) or "")
    return found or next(reversed(threads(worker.log.last_lines(_CRASH_LINES))), [])


def failure_of(
    worker: Worker, kind: str, message: str, signum: int | None = None, exit_code: int = EXIT_FAILED
) -> Failure:
    """Describe a failure of a rank as it was seen from outside, with the last lines of its log."""
    return Failure(
        rank=worker.rank,
        host=os.uname().nodename,
        kind=kind,
        message=message,
        step=worker.last_step,
        phase=worker.status_page.phase,
        signal=signum,
        traceback=worker.log.last_lines(_LAST_LINES),
        exit_code=exit_code,
    )


def keep(worker: Worker) -> None:
    """Keep a rank's own error with its output; the terminal shows the first cause alone, once."""
    if worker.failure is not None:
        worker.log.add(f"{worker.failure.traceback or ''}{worker.failure.kind}: {worker.failure.message}\n")
