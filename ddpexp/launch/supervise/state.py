"""The knowledge of one command about the run: a value that `decide` replaces, and questions about it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from ddpexp.errors import EXIT_DONE, Failure
from ddpexp.launch.supervise.messages import EndRun
from ddpexp.launch.supervise.severity import Severity
from ddpexp.launch.supervise.signals import STOP_SIGNALS
from ddpexp.launch.workers.page import What

FAILURE_SECONDS = 1.0  # after the first failure others may still be reported: a killed rank itself reports nothing
_LEAVE_SECONDS = 5.0  # from a stop request to SIGKILL where there is nothing to save


@dataclass(frozen=True)
class Rank:
    """One of this command's ranks."""

    number: int
    code: int | None = None  # exit code, or minus the signal's number
    failure: Failure | None = None  # as the rank reported it
    end: Failure | None = None  # how its process ended, as seen from outside
    failed_at: float = 0.0  # when the failure became known
    step: int | None = None  # the last one that is known to be done, once it has ended
    is_done: bool = False  # it has done all its work
    has_stopped: bool = False  # it exits because of a stop request
    was_killed: bool = False  # by the supervisor
    is_reported: bool = False  # the leading command knows of its failure

    @property
    def ended_well(self) -> bool:
        """Return whether it ended without a failure: done, or stopped on request."""
        return (self.is_done and self.code == EXIT_DONE) or (self.has_stopped and self.code == 128 + signal.SIGTERM)

    @property
    def cause(self) -> Failure | None:
        """Return its failure; None while there is none."""
        if self.failure is not None:
            return self.failure
        return None if self.ended_well else self.end


@dataclass(frozen=True)
class Report:
    """A failure that is not one of this command's ranks'."""

    failure: Failure
    severity: Severity
    at: float


@dataclass(frozen=True)
class Stop:
    """A stop of the run by a signal."""

    signum: int
    at: float  # when the first one arrived
    at_once: bool = False  # without saving: there is nothing to save
    by: str | None = None  # what stops the run, if it is not the signal itself


@dataclass(frozen=True)
class Agreement:
    """The agreement on the step at which all ranks save, end or stop: see `agreement`."""

    number: int = 0  # of the newest one
    what: What | None = None  # the one in progress is for, on the leading command
    next_what: What | None = None  # the next one is for
    profile: int = 0  # how many steps are to be profiled from the step of the one in progress on
    next_profile: int = 0  # of the next one
    stops: bool = False  # a stop was requested
    step: int = 0  # of the newest committed one
    bound: int = 0  # the latest boundary reported for the one in progress
    awaited: frozenset[int] = frozenset()  # the commands that have not reported theirs


class Stage(Enum):
    """How far the supervision of a command is."""

    WATCHING = auto()  # ranks live
    SETTLING = auto()  # all ranks have ended, perhaps by a stop signal that is still to reach this command
    PARTING = auto()  # the commands of the job tell one another how they ended
    OVER = auto()


@dataclass(frozen=True)
class State:
    """The knowledge of one command about the run. Units: times in seconds, of `time.monotonic`."""

    ranks: tuple[Rank, ...]
    first_rank: int = 0
    grace_seconds: float = 25.0  # from a stop signal to SIGKILL
    leader_host: str | None = None  # None: this command leads
    others: frozenset[int] = frozenset()  # the other commands that are connected; the leading one only, if one leads
    stage: Stage = Stage.WATCHING
    reports: tuple[Report, ...] = ()
    failed_at: float | None = None  # when the first failure became known
    killed_at: float | None = None
    parting_until: float | None = None
    stop: Stop | None = None
    decision: EndRun | None = None  # the leading command's, as it has told the others
    leader_lost: bool = False  # before it has told one
    began: int | None = None  # the step at which this start began to train
    rank_zero_trains: bool = False
    rank_zero_has_stepped: bool = False
    wish: tuple[int, What] = (0, "save")  # the number of the agreement that rank zero wants, and what for
    agreement: Agreement = Agreement()
    # When each signal that ends nothing was handled last, and the first signal that ends the run by source.
    handled_at: Mapping[int, float] = field(default_factory=dict, hash=False)
    first_end_at: Mapping[int, float] = field(default_factory=dict, hash=False)

    @property
    def leads(self) -> bool:
        """Return whether this command leads the job."""
        return self.leader_host is None

    @property
    def stops_at_once(self) -> bool:
        """Return whether the ranks are to exit without saving."""
        return self.stop is not None and self.stop.at_once

    @property
    def is_ending(self) -> bool:
        """Return whether the run ends, by a stop, a failure or a kill, each of which has a deadline."""
        return self.stop is not None or self.failed_at is not None or self.killed_at is not None

    @property
    def is_training(self) -> bool:
        """Return whether the training has begun, according to rank zero: before, there is nothing to save."""
        return self.rank_zero_trains or self.rank_zero_has_stepped

    def rank(self, number: int) -> Rank:
        """Return a rank of this command."""
        return self.ranks[number - self.first_rank]

    def lives(self, number: int) -> bool:
        """Return whether a rank of this command has neither ended nor failed."""
        rank = self.rank(number)
        return rank.code is None and rank.failure is None

    def is_overdue(self, now: float) -> bool:
        """Return whether the remaining ranks are to be killed now, after a failure or a stop."""
        left_on_request = self.stop is not None and self.stop.at_once and (self.failed_at or now) >= self.stop.at
        if self.failed_at is not None and not left_on_request and now - self.failed_at > FAILURE_SECONDS:
            return True
        seconds = min(_LEAVE_SECONDS, self.grace_seconds) if self.stops_at_once else self.grace_seconds
        return self.stop is not None and now - self.stop.at > seconds

    def may_be_stopped(self, now: float) -> bool:
        """Return whether ranks ended by a stop signal that may still reach this command.

        Schedulers send it to every process.
        """
        if self.stop is not None or not self._failed_recently(now):
            return False
        known = [(severity, cause.signal in STOP_SIGNALS) for severity, cause in self._known_causes()]
        return any(by_signal for _, by_signal in known) and all(
            by_signal or severity > Severity.ERROR for severity, by_signal in known
        )

    def may_learn_cause(self, now: float) -> bool:
        """Return whether only consequences are known, and other commands may still report the cause."""
        return self._failed_recently(now) and all(severity > Severity.ERROR for severity, _ in self._known_causes())

    def is_failure(self) -> bool:
        """Return whether the known ends of ranks are a failure, and not a stop.

        A rank that was ended by the stop signal itself did not fail: schedulers send it to every process. Nor did a
        rank that had nothing to save and was asked to exit, nor one that fails because it is killed, as
        launcher=inline can do.
        """
        if self.stop is None:
            return True
        ranks = [rank for rank in self.ranks if not self._failed_since_kill(rank)]
        ends = [(rank.failed_at, cause) for rank in ranks if (cause := rank.cause)]
        ends += [(report.at, report.failure) for report in self.reports]
        causes = [cause for at, cause in ends if not self.stop.at_once or 0 < at < self.stop.at]
        by_signal = any(cause.signal in STOP_SIGNALS for cause in causes)
        severities = [Severity.of(cause) for cause in causes if cause.signal not in STOP_SIGNALS]
        may_be_consequence = by_signal or self.stop.at_once
        return any(
            severity < Severity.DISCONNECTION or (severity is Severity.DISCONNECTION and not may_be_consequence)
            for severity in severities
        )

    def causes(self) -> list[Failure]:
        """Return all known failures, here and of other commands, the most genuine first.

        An unexpected death comes first, then a rank's own error; broken connections are usually consequences.
        """
        ranked = [
            (
                Severity.ENDED if self._left_on_request(rank) else Severity.of(cause),
                rank.failed_at,
                rank.number,
                cause,
            )
            for rank in self.ranks
            if (cause := rank.cause)
        ]
        ranked += [(report.severity, report.at, report.failure.rank, report.failure) for report in self.reports]
        return [failure for *_, failure in sorted(ranked, key=lambda entry: entry[:3])]

    def end_of_run(self) -> EndRun:
        """Return how the run ends: by the most genuine failure, if it is one and one is known, or by a stop."""
        cause = next(iter(self.causes()), None) if self.is_failure() else None
        return EndRun(cause, None if self.stop is None else self.stop.signum)

    def _failed_since_kill(self, rank: Rank) -> bool:
        """Return whether a rank's failure has become known since it was killed."""
        return self.killed_at is not None and rank.failed_at > self.killed_at

    def _left_on_request(self, rank: Rank) -> bool:
        """Return whether a rank without an error of its own has ended since the request to exit at once."""
        return self.stop is not None and self.stop.at_once and rank.failure is None and rank.failed_at >= self.stop.at

    def _known_causes(self) -> list[tuple[Severity, Failure]]:
        here = [(Severity.of(cause), cause) for rank in self.ranks if (cause := rank.cause)]
        return here + [(report.severity, report.failure) for report in self.reports]

    def _failed_recently(self, now: float) -> bool:
        return self.failed_at is not None and now - self.failed_at <= FAILURE_SECONDS
