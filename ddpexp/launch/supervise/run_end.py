"""How a run ends: the failures and the stop that a command knows of, and the exit code or error that follow from them.

The supervisor records them, and raises the verdict when all workers have ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ddpexp.errors import EXIT_DONE, EXIT_REFUSED, Failure, RefusedError, StoppedError, WorkerError
from ddpexp.launch.rendezvous.wire import Peer
from ddpexp.launch.supervise.causes import (
    ReportedFailure,
    Worker,
    cause_of,
    is_mismatch,
    locate_mismatch,
    rank_causes,
    weight,
)
from ddpexp.launch.supervise.signals import STOP_SIGNALS

# After the first failure the others may still report theirs: a killed rank reports nothing, and its peers' broken
# connections are reported first.
_FAILURE_SECONDS = 1.0
_LEAVE_SECONDS = 5.0  # from a stop request to SIGKILL where there is nothing to save


@dataclass(frozen=True)
class Stop:
    """A stop by a signal."""

    signum: int
    at: float  # when the first one arrived
    at_once: bool = False  # without saving: there is nothing to save


@dataclass
class RunEnd:
    """What one command knows of how the run ends."""

    workers: Sequence[Worker]
    leader: Peer | None = None  # where another command leads
    speaks: bool = True  # a user looks at this terminal who does not see the leading command's
    reported: list[ReportedFailure] = field(default_factory=list)  # by other commands
    stop: Stop | None = None
    stopped_by: str | None = None  # what ends the run, if it is not the signal itself
    failed_at: float | None = None  # when the first failure became known
    leader_lost: bool = False
    began: int | None = None  # the step at which this start began

    def fail(self, at: float) -> None:
        """Record the time of a failure, if it is the first."""
        self.failed_at = self.failed_at or at

    def report(self, failure: Failure, failure_weight: int) -> None:
        """Record a failure that is not one of this command's workers'."""
        now = time.monotonic()
        self.reported.append(ReportedFailure(failure, failure_weight, now))
        self.fail(now)

    def stop_by(self, signum: int) -> None:
        """Record a stop signal; the time counts from the first one."""
        if self.stop is None:
            self.stop = Stop(signum, time.monotonic())
        else:
            self.stop = Stop(signum, self.stop.at, self.stop.at_once)

    def stop_at_once(self, signum: int) -> None:
        """Record a stop signal that ends the workers without saving."""
        self.stop_by(signum)
        assert self.stop is not None
        self.stop = Stop(signum, self.stop.at, at_once=True)

    @property
    def at_once(self) -> bool:
        """Return whether the workers are to exit without saving."""
        return self.stop is not None and self.stop.at_once

    def is_overdue(self, grace_seconds: float) -> bool:
        """Return whether the remaining workers are to be killed now, after a failure or a stop."""
        now = time.monotonic()
        requested = self.stop is not None and self.at_once and (self.failed_at or now) >= self.stop.at
        if self.failed_at is not None and not requested and now - self.failed_at > _FAILURE_SECONDS:
            return True
        grace = min(_LEAVE_SECONDS, grace_seconds) if self.at_once else grace_seconds
        return self.stop is not None and now - self.stop.at > grace

    def may_be_stopped(self) -> bool:
        """Return whether workers ended by a stop signal that may still reach this command.

        Schedulers send it to every process.
        """
        if self.stop is not None or not self._failed_recently():
            return False
        causes = [cause_of(worker) for worker in self.workers if not worker.well]
        causes += [report.failure for report in self.reported]
        by_signal = [cause.signal in STOP_SIGNALS for cause in causes]
        return any(by_signal) and all(
            stopped or weight(cause) > 1 for stopped, cause in zip(by_signal, causes, strict=True)
        )

    def may_learn_cause(self) -> bool:
        """Return whether only consequences are known, and other commands may still report the cause."""
        if not self._failed_recently():
            return False
        causes = [cause_of(worker) for worker in self.workers if not worker.well]
        return all(weight(cause) > 1 for cause in causes) and all(report.weight > 1 for report in self.reported)

    def first_cause(self) -> Failure | None:
        """Return the most genuine failure; None where the run did not fail, or none is known."""
        failures = rank_causes(self.workers, self.reported, self.at_once)
        return failures[0] if failures and self.is_failure() else None

    def is_failure(self) -> bool:
        """Return whether the known ends of ranks are a failure, and not a stop.

        A rank that was ended by the stop signal itself did not fail: schedulers send it to every process. Nor did a
        rank that had nothing to save and was asked to exit.
        """
        if self.stop is None:
            return True
        bad = [worker for worker in self.workers if (worker.failure or worker.code is not None) and not worker.well]
        ends = [(worker.failed_at, cause_of(worker)) for worker in bad if not worker.ended]
        ends += [(report.at, report.failure) for report in self.reported]
        causes = [cause for at, cause in ends if not self.at_once or 0 < at < self.stop.at]
        by_signal = any(cause.signal in STOP_SIGNALS for cause in causes)
        weights = [weight(cause) for cause in causes if cause.signal not in STOP_SIGNALS]
        return any(weight < 2 or (weight == 2 and not by_signal and not self.at_once) for weight in weights)

    def verdict(self) -> int:
        """Return the exit code of a run that is done.

        Raises:
            WorkerError: the run failed. RefusedError: the workers refused to start. StoppedError: a signal ended it.
        """
        has_stopped = any(worker.stopped for worker in self.workers)
        if all(worker.well for worker in self.workers) and not self.reported and not has_stopped:
            return EXIT_DONE  # a signal after the end has no effect
        if self.stop is not None and not self.is_failure() and not (self.leader_lost and not self.at_once):
            raise self._stopped(self.stop)
        failures = rank_causes(self.workers, self.reported, self.at_once)
        if self.leader_lost:
            assert self.leader is not None
            host = self.leader.host
            text = f"the command of rank zero on {host} is gone: it was killed or stopped, or its host is cut off"
            failures.insert(0, Failure(rank=0, host=host, kind="CommandLost", message=text))
        first = locate_mismatch(failures[0], self.workers) if is_mismatch(failures[0]) else failures[0]
        others = tuple(sorted({failure.rank for failure in failures} - {first.rank}))
        if first.exit_code == EXIT_REFUSED and first.traceback is None:
            raise RefusedError.from_dict(first.error_fields())
        shown = first.rank == 0 and any(worker.rank == 0 and worker.failure is None for worker in self.workers)
        leader = None if self.leader_lost else self.leader
        raise WorkerError(
            first,
            others,
            shown,
            leader=leader.host if leader is not None else None,
            quiet=leader is not None and not self.speaks,
        )

    def _failed_recently(self) -> bool:
        return self.failed_at is not None and time.monotonic() - self.failed_at <= _FAILURE_SECONDS

    def _stopped(self, stop: Stop) -> StoppedError:
        """Return the stop, with how far the run is, which rank zero knows: it is the rank that saves."""
        first = next((worker for worker in self.workers if worker.rank == 0), None)
        if first is None or stop.at_once:
            return StoppedError(stop.signum, by=self.stopped_by)
        step = first.step if first.stopped else first.last_step
        return StoppedError(stop.signum, step=step, saved=first.stopped, began=self.began, by=self.stopped_by)
