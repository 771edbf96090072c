"""Which failure is the run's, and whether the ends of ranks are a failure: tables of states."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from ddpexp.errors import Failure
from ddpexp.launch.supervise.messages import EndRun
from ddpexp.launch.supervise.severity import Severity
from ddpexp.launch.supervise.state import Rank, Report, State, Stop
from ddpexp.launch.supervise.verdict import verdict_on

HOST = "node0"
DEATH: dict[str, Any] = {"kind": "SIGKILL", "signal": signal.SIGKILL}
LOST: dict[str, Any] = {"kind": "PeerError"}
ENDED: dict[str, Any] = {"kind": "Ended"}
BY_TERM: dict[str, Any] = {"kind": "SIGTERM", "signal": signal.SIGTERM}


def failure(rank: int = 0, kind: str = "ValueError", **fields: Any) -> Failure:
    return Failure(rank=rank, host=HOST, kind=kind, message="no luck", phase="train", **fields)


def died(rank: int, at: float, **how: Any) -> Rank:
    """Return a rank whose process ended so, without a word."""
    return Rank(rank, code=-9, end=failure(rank, **(how or DEATH)), failed_at=at)


def spoke(rank: int, at: float, **how: Any) -> Rank:
    """Return a rank that reported a failure of its own, and ended."""
    return Rank(rank, code=1, failure=failure(rank, **how), end=failure(rank, **ENDED), failed_at=at)


def ranks(failures: list[Failure]) -> list[int]:
    return [one.rank for one in failures]


def test_what_a_rank_has_reported_itself_is_its_cause_however_it_ended() -> None:
    said = failure(2)
    assert Rank(2, code=-9, failure=said, end=failure(2, **DEATH), was_killed=True).cause is said


@pytest.mark.parametrize(
    ("fields", "well"),
    [
        ({"is_done": True, "code": 0}, True),
        ({"is_done": False, "code": 0}, False),
        ({"is_done": True, "code": 1}, False),
        ({"is_done": True, "code": None}, False),
        ({"has_stopped": True, "code": 143}, True),
        ({"has_stopped": True, "code": 0}, False),
        ({"has_stopped": False, "code": 143}, False),
        ({"has_stopped": True, "code": -15}, False),
    ],
    ids=str,
)
def test_only_a_rank_that_is_done_or_has_left_as_requested_has_ended_well(fields: dict[str, Any], well: bool) -> None:
    rank = Rank(0, end=None if fields["code"] is None else failure(), **fields)
    assert rank.ended_well == well
    assert len(State((rank,)).causes()) == (not well and rank.code is not None)


def test_ranks_that_live_or_ended_well_are_no_causes() -> None:
    well = [Rank(0), Rank(1, is_done=True, code=0, end=failure()), Rank(2, has_stopped=True, code=143, end=failure())]
    assert State(tuple(well)).causes() == []
    living = Rank(3, failure=failure(3))  # it has said so and has not ended yet
    assert ranks(State((*well, living)).causes()) == [3]


def test_the_most_genuine_cause_comes_first_whenever_it_was_noticed() -> None:
    state = State((spoke(0, 1.0, **LOST), died(1, 0.5, **ENDED), spoke(2, 3.0), died(3, 4.0)))
    assert ranks(state.causes()) == [3, 2, 0, 1]


def test_of_causes_alike_the_earliest_comes_first_and_then_the_lowest_rank() -> None:
    state = State((spoke(2, 1.0), spoke(1, 1.0), spoke(0, 2.0)))
    assert ranks(state.causes()) == [1, 2, 0]


def test_what_other_commands_report_is_ranked_among_this_ones() -> None:
    reports = (
        Report(failure(4), Severity.ERROR, 3.0),
        Report(failure(5), Severity.DEATH, 9.0),
        Report(failure(6), Severity.ERROR, 1.0),
        Report(failure(7), Severity.ENDED, 0.0),
    )
    state = State((spoke(0, 2.0),), reports=reports)
    assert ranks(state.causes()) == [5, 6, 0, 4, 7]
    assert State(()).causes() == []


def test_ranks_that_must_exit_at_once_have_done_so_unless_they_name_an_error() -> None:
    state = State((died(0, 1.0), spoke(1, 2.0), spoke(2, 1.5, **LOST)))
    assert ranks(state.causes()) == [0, 1, 2]
    at_once = replace(state, stop=Stop(15, 0.5, at_once=True))
    assert ranks(at_once.causes()) == [1, 2, 0]
    heard = (Report(failure(5), Severity.DISCONNECTION, 0.0),)
    assert ranks(replace(at_once, ranks=at_once.ranks[:2], reports=heard).causes()) == [1, 5, 0]


SAVED = Rank(0, code=143, has_stopped=True, end=failure())
STOP, AT_ONCE = Stop(signal.SIGTERM, 1.0), Stop(signal.SIGTERM, 1.0, at_once=True)


@pytest.mark.parametrize(
    ("stop", "other", "fails"),
    [
        (None, died(1, 2.0), True),
        (STOP, replace(SAVED, number=1), False),
        (STOP, died(1, 2.0), True),  # while the others saved
        (STOP, spoke(1, 2.0), True),
        (STOP, spoke(1, 2.0, **LOST), True),  # nothing explains that it lost a peer
        (STOP, died(1, 2.0, **BY_TERM), False),  # the scheduler's signal was faster than the command's
        (STOP, replace(died(1, 2.0, **ENDED), was_killed=True), False),  # after the time of grace
        (AT_ONCE, died(1, 2.0), False),  # as requested
        (AT_ONCE, spoke(1, 2.0), False),
        (AT_ONCE, died(1, 0.5), True),  # before the request
        (AT_ONCE, spoke(1, 0.5, **LOST), False),
    ],
    ids=str,
)
def test_a_stop_is_no_failure_but_a_rank_that_fails_during_one_is(stop: Stop | None, other: Rank, fails: bool) -> None:
    state = State((SAVED, other), stop=stop)
    assert state.is_failure() is fails
    assert (verdict_on(state).stop is None) is fails


@pytest.mark.parametrize(("at", "fails"), [(2.0, True), (4.0, False)])
def test_an_error_that_follows_from_a_kill_is_part_of_the_stop(at: float, fails: bool) -> None:
    state = State((replace(spoke(0, at), was_killed=True),), stop=STOP, killed_at=3.0)
    assert state.is_failure() is fails


def test_a_connection_that_broke_since_a_signal_ended_the_peer_is_part_of_the_stop() -> None:
    state = State((died(0, 2.0, **BY_TERM), spoke(1, 2.1, **LOST)), stop=STOP)
    assert not state.is_failure()


def test_a_signal_after_the_end_has_no_effect() -> None:
    done = Rank(0, code=0, is_done=True, end=failure())
    assert verdict_on(State((done,), stop=STOP)) == verdict_on(State((done,)))
    assert verdict_on(State((SAVED,), stop=STOP)).stop == STOP


def test_the_commands_that_do_not_lead_report_what_the_leading_one_decides() -> None:
    lost = State((spoke(1, 2.0, **LOST),), first_rank=1, leader_host="node0", stop=STOP)
    assert verdict_on(lost).stop is None
    assert verdict_on(replace(lost, decision=EndRun(None, 15))).stop == STOP
    done = replace(lost, ranks=(Rank(1, code=0, is_done=True, end=failure(1)),), decision=EndRun(failure(7), None))
    assert verdict_on(done).causes == [failure(7)]
    causes = verdict_on(replace(lost, decision=EndRun(failure(7), 15))).causes
    assert [(cause.kind, cause.rank) for cause in causes] == [("ValueError", 7), ("PeerError", 1)]


def test_a_command_whose_leader_is_gone_fails_because_of_that_whatever_its_ranks_report() -> None:
    state = State((died(1, 2.0),), first_rank=1, leader_host="node9", leader_lost=True)
    causes = verdict_on(state).causes
    assert [(cause.kind, cause.rank) for cause in causes] == [("CommandLost", 0), ("SIGKILL", 1)]
    assert causes[0].host == "node9"


@pytest.mark.parametrize(
    ("state", "after", "overdue"),
    [
        (State(()), 1e9, False),
        (State((), failed_at=1.0), 1.9, False),
        (State((), failed_at=1.0), 2.1, True),
        (State((), stop=STOP, grace_seconds=25.0), 25.9, False),
        (State((), stop=STOP, grace_seconds=25.0), 26.1, True),
        (State((), stop=STOP, failed_at=2.0), 3.1, True),
        (State((), stop=AT_ONCE, grace_seconds=25.0), 5.9, False),
        (State((), stop=AT_ONCE, grace_seconds=25.0), 6.1, True),  # there is nothing to save
        (State((), stop=AT_ONCE, grace_seconds=3.0), 4.1, True),
        (State((), stop=AT_ONCE, failed_at=2.0), 5.9, False),  # ranks that leave on request
        (State((), stop=AT_ONCE, failed_at=0.5), 1.6, True),
    ],
)
def test_ranks_have_a_second_after_a_failure_and_the_time_of_grace_after_a_stop(
    state: State, after: float, overdue: bool
) -> None:
    assert state.is_overdue(after) is overdue


@pytest.mark.parametrize(
    ("others", "now", "waits"),
    [
        ([died(1, 1.0, **BY_TERM)], 1.5, True),
        ([died(1, 1.0, **BY_TERM)], 2.5, False),
        ([died(1, 1.0, **BY_TERM), spoke(2, 1.0, **LOST)], 1.5, True),
        ([died(1, 1.0, **BY_TERM), spoke(2, 1.0)], 1.5, False),
        ([died(1, 1.0)], 1.5, False),
        ([spoke(1, 1.0, **LOST)], 1.5, False),
    ],
    ids=str,
)
def test_ranks_that_a_stop_signal_ended_wait_for_the_signal_to_the_command(
    others: list[Rank], now: float, waits: bool
) -> None:
    assert State(tuple(others), failed_at=1.0).may_be_stopped(now) is waits
    assert not State(tuple(others), failed_at=1.0, stop=STOP).may_be_stopped(now)


def test_consequences_alone_wait_for_the_cause() -> None:
    lost = State((spoke(0, 1.0, **LOST),), failed_at=1.0)
    assert lost.may_learn_cause(1.5)
    assert not lost.may_learn_cause(2.5)
    reports = (Report(failure(3), Severity.ERROR, 1.2),)
    assert not replace(lost, reports=reports).may_learn_cause(1.5)
    assert not State((spoke(0, 1.0),), failed_at=1.0).may_learn_cause(1.5)
