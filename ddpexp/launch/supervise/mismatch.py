"""Ranks that call different collective operations: gloo ends the one that gets data of another size than expected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ddpexp.errors import Failure
from ddpexp.launch.supervise.stacks import Stack, raised, shown, threads
from ddpexp.launch.workers.rank_log import Log

KIND = "CollectiveMismatch"
MESSAGE = "it received data of another size than expected: the ranks call different collective operations"
_SIZE_MISMATCH = "op.preamble.length <= op.nbytes"  # gloo's message, after which it aborts the process
_CRASH_LINES = 200  # more than libraries and Python print on a crash


def is_in(log: Log) -> bool:
    """Return whether the log of a rank that has aborted ends with gloo's message."""
    return _SIZE_MISMATCH in log.last_lines(_CRASH_LINES)


def is_mismatch(failure: Failure) -> bool:
    """Return whether ranks called different collective operations."""
    return failure.kind == KIND


def stack_of(failure: Failure | None, log: Log) -> Stack:
    """Return the stack of a rank's own error, or the last one that it dumped."""
    stack = raised((failure and failure.traceback) or "")
    return stack or next(reversed(threads(log.last_lines(_CRASH_LINES))), [])


def located(failure: Failure, stacks: Mapping[int, Stack]) -> Failure:
    """Add to a mismatch where each rank was; the rank that was in the recipe's own code, if any, gets named."""
    frames = {rank: shown(stack) for rank, stack in stacks.items() if stack}
    if failure.rank not in frames or len(frames) < 2:
        return failure
    rank = next((rank for rank, frame in frames.items() if not frame.is_ours), failure.rank)
    places = "; ".join(f"rank {number} {frame}" for number, frame in list(frames.items())[:8])
    message = (
        f"the ranks called different collective operations: {places}. Do all take the same path through the recipe?"
    )
    return replace(failure, rank=rank, message=message, traceback=None)
