"""The end of a run, as its state tells it: the exit code, or the error that the command raises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpexp.errors import EXIT_DONE, Failure, RefusedError, StoppedError, WorkerError
from ddpexp.launch.supervise import mismatch
from ddpexp.launch.supervise.state import Rank, State, Stop
from ddpexp.launch.supervise.worker import Worker


@dataclass(frozen=True)
class Verdict:
    """How a run has ended; without a stop and without a cause it is done."""

    stop: Stop | None = None
    causes: Sequence[Failure] = ()  # the first one is the run's


def verdict_on(state: State) -> Verdict:
    """Return how the run has ended: as the leading command has decided, for the commands that it has told."""
    decision = None if state.leads else state.decision
    cause = None if decision is None else decision.cause
    has_stopped = any(rank.has_stopped for rank in state.ranks)
    if all(rank.ended_well for rank in state.ranks) and not state.reports and cause is None and not has_stopped:
        return Verdict()  # a signal after the end has no effect
    is_failure = state.is_failure() if decision is None else cause is not None
    if state.stop is not None and not is_failure and not (state.leader_lost and not state.stops_at_once):
        return Verdict(stop=state.stop)
    causes = state.causes()
    if cause is not None:
        causes.insert(0, cause)
    if state.leader_lost:
        assert state.leader_host is not None
        host = state.leader_host
        text = f"the command of rank zero on {host} is gone: it was killed or stopped, or its host is cut off"
        causes.insert(0, Failure(rank=0, host=host, kind="CommandLost", message=text))
    return Verdict(causes=causes)


def exit_code_of(state: State, workers: Sequence[Worker], speaks: bool = True) -> int:
    """Return the exit code of a run that is done.

    `speaks`: a user looks at this terminal who does not see the leading command's.

    Raises:
        WorkerError: the run failed. RefusedError: the workers refused to start. StoppedError: a signal ended it.
    """
    verdict = verdict_on(state)
    if verdict.stop is not None:
        raise _stopped(verdict.stop, state)
    if not verdict.causes:
        return EXIT_DONE
    first = verdict.causes[0]
    if mismatch.is_mismatch(first):
        failures = {rank.number: rank.failure for rank in state.ranks}
        stacks = {worker.rank: mismatch.stack_of(failures[worker.rank], worker.log) for worker in workers}
        first = mismatch.located(first, stacks)
    if first.refused:
        raise RefusedError.from_dict(first.error_fields())
    rank_zero = _rank_zero(state)
    leader = None if state.leader_lost else state.leader_host
    raise WorkerError(
        first,
        others=tuple(sorted({failure.rank for failure in verdict.causes} - {first.rank})),
        shown=first.rank == 0 and rank_zero is not None and rank_zero.failure is None,
        leader=leader,
        quiet=leader is not None and not speaks,
    )


def _stopped(stop: Stop, state: State) -> StoppedError:
    """Return the stop, with how far the run is, which rank zero knows: it is the rank that saves."""
    rank = _rank_zero(state)
    if rank is None or stop.at_once:
        return StoppedError(stop.signum, by=stop.by)
    return StoppedError(stop.signum, step=rank.step, saved=rank.has_stopped, began=state.began, by=stop.by)


def _rank_zero(state: State) -> Rank | None:
    return state.ranks[0] if state.first_rank == 0 else None
