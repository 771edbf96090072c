"""The actions of a command on each event, as tables."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ddpexp.errors import Failure
from ddpexp.launch.supervise.decide import decide
from ddpexp.launch.supervise.events import (
    COMMAND,
    OTHER_COMMANDS,
    Action,
    BeginBoundary,
    BoundRead,
    CommandLost,
    CommitBoundary,
    DismissRanks,
    DumpStacks,
    Event,
    FromCommand,
    FromRank,
    HangFound,
    KillRanks,
    KillServer,
    LeaderSilent,
    RankErrored,
    RankExited,
    RankZeroMoved,
    Send,
    ShowLastOutput,
    ShowStop,
    Signalled,
    Tick,
)
from ddpexp.launch.supervise.messages import (
    BeginAgreement,
    CommandDone,
    CommandStopped,
    CommitStep,
    DebuggerQuit,
    EndRun,
    LeaveNow,
    RankFailed,
    ReportBound,
    SignalReceived,
    StopRun,
    TrainingBegan,
    WorkerDone,
    WorkerStopped,
)
from ddpexp.launch.supervise.mismatch import KIND as MISMATCH
from ddpexp.launch.supervise.severity import Severity
from ddpexp.launch.supervise.state import Agreement, Rank, Stage, State, Stop

TERM, USR1, USR2, QUIT = int(signal.SIGTERM), int(signal.SIGUSR1), int(signal.SIGUSR2), int(signal.SIGQUIT)


def failure(rank: int = 0, kind: str = "ValueError", **fields: Any) -> Failure:
    return Failure(rank=rank, host=f"node{rank}", kind=kind, message="no luck", phase="train", **fields)


ERROR, DEATH = failure(), failure(kind="SIGKILL", signal=9)
PEER_ERROR, MIXED_UP = failure(kind="PeerError"), failure(kind=MISMATCH, signal=6)
BUILDS = State((Rank(0), Rank(1)), others=frozenset([1]))  # the leading one of two commands
LEADS = replace(BUILDS, rank_zero_trains=True, rank_zero_has_stepped=True)
FOLLOWS = State((Rank(2), Rank(3)), first_rank=2, others=frozenset([0]), leader_host="node0")
STOP = Stop(TERM, 5.0)
STOPPING = replace(LEADS, stop=STOP, agreement=Agreement(number=1, stops=True))
LEAVING = replace(BUILDS, stop=replace(STOP, at_once=True))


def stopped(number: int = TERM) -> tuple[Action, ...]:
    """Return what the leading command does on a signal while it trains."""
    return ShowStop(number), Send(StopRun(number)), Send(BeginAgreement(1)), BeginBoundary(1)


@pytest.mark.parametrize(
    ("state", "event", "actions"),
    [
        # Signals.
        (LEADS, Signalled(TERM, COMMAND), stopped()),
        (LEADS, Signalled(TERM, 1), stopped()),  # by a rank
        (LEADS, FromCommand(1, SignalReceived(USR2, False)), stopped(USR2)),
        (BUILDS, Signalled(TERM, COMMAND), (Send(LeaveNow(TERM)), ShowStop(TERM), DismissRanks())),
        (FOLLOWS, Signalled(TERM, COMMAND), (ShowStop(TERM), Send(SignalReceived(TERM, False)))),
        (FOLLOWS, FromCommand(0, StopRun(TERM)), (ShowStop(TERM),)),
        (FOLLOWS, FromCommand(0, LeaveNow(TERM)), (ShowStop(TERM), DismissRanks())),
        (STOPPING, Signalled(TERM, COMMAND), ()),  # the first one from this source is the same signal
        (LEAVING, Signalled(TERM, 0), ()),  # the rank forwards what it was dismissed with
        (LEADS, Signalled(USR1, COMMAND), (Send(BeginAgreement(1)), BeginBoundary(1))),
        (BUILDS, Signalled(USR1, COMMAND), ()),  # there is nothing to save
        (STOPPING, Signalled(USR1, COMMAND), ()),
        (FOLLOWS, Signalled(USR1, COMMAND), (Send(SignalReceived(USR1, False)),)),
        (LEADS, Signalled(QUIT, 1), (DumpStacks(1), Send(SignalReceived(QUIT, False)))),
        (FOLLOWS, Signalled(QUIT, COMMAND), (DumpStacks(COMMAND), Send(SignalReceived(QUIT, False)))),
        (LEADS, FromCommand(1, CommandStopped(TERM)), stopped()),  # the signal reached only that command
        (STOPPING, FromCommand(1, CommandStopped(TERM)), ()),
        # A debugger.
        (LEADS, FromRank(1, DebuggerQuit(False)), stopped(signal.SIGINT)),
        (
            LEADS,
            FromRank(1, DebuggerQuit(True)),
            (*stopped(signal.SIGINT)[:2], ShowStop(signal.SIGINT), DismissRanks(), *stopped()[2:]),
        ),
        # Failures.
        (FOLLOWS, RankErrored(3, failure(3)), (Send(RankFailed(failure(3), Severity.ERROR)),)),
        (FOLLOWS, RankExited(3, -9, DEATH), (Send(RankFailed(DEATH, Severity.DEATH)),)),
        (replace(FOLLOWS, stop=replace(STOP, at_once=True)), RankErrored(3, failure(3)), ()),
        (LEADS, RankErrored(1, ERROR), ()),  # the others have a second to report theirs
        (LEADS, RankExited(1, -6, MIXED_UP), (DumpStacks(),)),
        (LEADS, FromCommand(1, RankFailed(DEATH, Severity.DEATH)), ()),
        (LEADS, HangFound(ERROR), (KillRanks(), Send(EndRun(ERROR, None)))),
        (FOLLOWS, FromCommand(0, EndRun(ERROR, None)), (KillRanks(),)),
        (FOLLOWS, FromCommand(0, EndRun(None, TERM)), (ShowStop(TERM), KillRanks())),
        (FOLLOWS, CommandLost(0, ERROR), (KillRanks(),)),
        (FOLLOWS, LeaderSilent(), (KillRanks(),)),
        (LEADS, CommandLost(7, ERROR), ()),  # it has ended before
        # Agreements.
        (BUILDS, RankZeroMoved(True, (1, "save")), (Send(BeginAgreement(1)), BeginBoundary(1))),
        (LEADS, RankZeroMoved(True, (0, "save")), ()),
        (FOLLOWS, FromCommand(0, BeginAgreement(4)), (BeginBoundary(4),)),
        (FOLLOWS, BoundRead(4, 17), (Send(ReportBound(4, 17)),)),
        (FOLLOWS, FromCommand(0, CommitStep(4, 18, "save")), (CommitBoundary(CommitStep(4, 18, "save")),)),
    ],
    ids=str,
)
def test_an_event_has_these_actions(state: State, event: Event, actions: tuple[Action, ...]) -> None:
    assert tuple(decide(state, event, 6.0)[1]) == actions


def after(state: State, *happened: tuple[float, Event]) -> tuple[State, list[Action]]:
    """Return the state after these events at their times, and the actions of the last one."""
    actions: Sequence[Action] = ()
    for now, event in happened:
        state, actions = decide(state, event, now)
    return state, list(actions)


@pytest.mark.parametrize(
    ("state", "happened", "actions"),
    [
        # A second signal from the same source after two seconds.
        (LEADS, [(5.0, Signalled(TERM, 1)), (7.1, Signalled(TERM, 1))], [KillRanks(), Send(EndRun(None, TERM))]),
        (LEADS, [(5.0, Signalled(TERM, 1)), (6.9, Signalled(TERM, 1))], []),
        (LEADS, [(5.0, Signalled(TERM, 1)), (7.1, Signalled(TERM, COMMAND))], []),  # its first one comes late
        (LEADS, [(5.0, Signalled(USR2, 1)), (7.1, Signalled(USR2, 1))], []),
        (
            LEADS,
            [(5.0, Signalled(TERM, 1)), (5.1, FromCommand(1, SignalReceived(TERM, True)))],
            [KillRanks(), Send(EndRun(None, TERM))],
        ),
        (
            FOLLOWS,
            [(5.0, Signalled(TERM, 2)), (7.1, Signalled(TERM, 2))],
            [Send(SignalReceived(TERM, True)), KillRanks()],
        ),
        (LEADS, [(5.0, Signalled(USR2, 1)), (5.1, Signalled(TERM, 1))], [ShowStop(TERM), Send(StopRun(TERM))]),
        # Within two seconds a request that ends nothing is the same one.
        (LEADS, [(5.0, Signalled(QUIT, 1)), (6.9, Signalled(QUIT, COMMAND))], []),
        (
            LEADS,
            [(5.0, Signalled(QUIT, 1)), (7.1, Signalled(QUIT, COMMAND))],
            [DumpStacks(COMMAND), Send(SignalReceived(QUIT, False))],
        ),
        # Deadlines.
        (LEADS, [(5.0, RankErrored(1, ERROR)), (5.9, Tick())], []),
        (LEADS, [(5.0, RankErrored(1, ERROR)), (6.1, Tick())], [KillRanks(), Send(EndRun(ERROR, None))]),
        (LEADS, [(5.0, RankErrored(1, ERROR)), (6.1, Tick()), (7.0, Tick())], []),
        (LEADS, [(5.0, RankErrored(1, ERROR)), (6.1, Tick()), (8.2, Tick())], [KillServer()]),
        # A command that was suspended first handles what has arrived meanwhile.
        (LEADS, [(5.0, RankErrored(1, ERROR)), (9.0, FromRank(0, WorkerDone()))], []),
        (STOPPING, [(29.0, Tick())], []),
        (STOPPING, [(30.1, Tick())], [KillRanks(), Send(EndRun(None, TERM))]),
        (LEAVING, [(10.1, Tick())], [KillRanks(), Send(EndRun(None, TERM))]),
        # A cause that comes late.
        (
            LEADS,
            [
                (5.0, RankErrored(1, PEER_ERROR)),
                (6.1, Tick()),
                (6.2, FromCommand(1, RankFailed(DEATH, Severity.DEATH))),
            ],
            [Send(EndRun(DEATH, None))],
        ),
        (
            LEADS,
            [(5.0, RankErrored(1, ERROR)), (6.1, Tick()), (6.2, FromCommand(1, RankFailed(ERROR, Severity.ERROR)))],
            [],
        ),
        # Ends.
        (
            FOLLOWS,
            [(5.0, FromRank(2, WorkerDone())), (5.0, RankExited(2, 0, ERROR)), (5.0, FromRank(3, WorkerDone()))],
            [],
        ),
        (
            replace(FOLLOWS, ranks=(Rank(2),)),
            [(5.0, FromRank(2, WorkerDone())), (5.0, RankExited(2, 0, ERROR))],
            [ShowLastOutput(), Send(CommandDone())],
        ),
        (
            replace(FOLLOWS, ranks=(Rank(2),), stop=STOP),
            [(5.0, FromRank(2, WorkerStopped(7))), (5.0, RankExited(2, 143, ERROR))],
            [ShowLastOutput(), Send(CommandStopped(TERM))],
        ),
        (
            replace(LEADS, ranks=(Rank(0),)),
            [(5.0, RankExited(0, -9, DEATH))],
            [ShowLastOutput(), Send(EndRun(DEATH, None))],
        ),
        (
            replace(LEADS, ranks=(Rank(0),)),
            [(5.0, RankErrored(0, PEER_ERROR)), (5.1, RankExited(0, 1, DEATH)), (5.9, Tick())],
            [],  # another command may know the cause
        ),
        (
            replace(LEADS, ranks=(Rank(0),)),
            [(5.0, RankErrored(0, PEER_ERROR)), (5.1, RankExited(0, 1, DEATH)), (6.1, Tick())],
            [Send(EndRun(PEER_ERROR, None))],
        ),
    ],
    ids=str,
)
def test_a_sequence_of_events_ends_with_these_actions(
    state: State, happened: list[tuple[float, Event]], actions: list[Action]
) -> None:
    assert after(state, *happened)[1] == actions


def test_a_failure_that_is_heard_of_after_a_good_end_here_ends_the_other_commands() -> None:
    alone = replace(LEADS, ranks=(Rank(0),), others=frozenset([1, 2]))
    done, _ = after(alone, (5.0, FromRank(0, WorkerDone())), (5.0, RankExited(0, 0, ERROR)))
    assert done.stage is Stage.PARTING
    assert after(done, (5.1, FromCommand(1, RankFailed(DEATH, Severity.DEATH))))[1] == [Send(EndRun(DEATH, None))]


ALONE = State((Rank(0),))
ENDS = (5.0, RankExited(0, -9, DEATH))


@pytest.mark.parametrize(
    ("state", "happened", "stage"),
    [
        (ALONE, [(5.0, Tick())], Stage.WATCHING),
        (ALONE, [ENDS], Stage.OVER),
        (ALONE, [(5.0, RankExited(0, 143, failure(kind="SIGTERM", signal=15)))], Stage.SETTLING),
        (ALONE, [(5.0, RankExited(0, 143, failure(kind="SIGTERM", signal=15))), (6.1, Tick())], Stage.OVER),
        (replace(LEADS, ranks=ALONE.ranks), [ENDS, (14.9, Tick())], Stage.PARTING),
        (replace(LEADS, ranks=ALONE.ranks), [ENDS, (15.1, Tick())], Stage.OVER),
        (replace(LEADS, ranks=ALONE.ranks), [ENDS, (5.1, FromCommand(1, CommandDone()))], Stage.OVER),
        (replace(FOLLOWS, ranks=(Rank(2),)), [(5.0, RankExited(2, -9, DEATH)), (14.9, Tick())], Stage.PARTING),
        (replace(FOLLOWS, ranks=(Rank(2),)), [(5.0, RankExited(2, -9, DEATH)), (15.1, Tick())], Stage.OVER),
        (
            replace(FOLLOWS, ranks=(Rank(2),)),
            [(5.0, FromRank(2, WorkerDone())), (5.0, RankExited(2, 0, ERROR))],
            Stage.OVER,  # the leading command needs nothing more of it
        ),
    ],
    ids=str,
)
def test_a_command_waits_for_the_others_as_long_as_they_matter(
    state: State, happened: list[tuple[float, Event]], stage: Stage
) -> None:
    assert after(state, *happened)[0].stage is stage


def test_an_end_is_noted_once_with_its_last_step() -> None:
    ended, _ = after(LEADS, (5.0, RankExited(1, -9, replace(DEATH, rank=1, step=4))), (6.0, RankExited(1, 0, ERROR)))
    rank = ended.rank(1)
    assert (rank.code, rank.cause, rank.step, rank.failed_at) == (-9, replace(DEATH, rank=1, step=4), 4, 5.0)
    assert ended.failed_at == 5.0


def test_a_rank_that_saved_has_stopped_after_the_step_that_it_names() -> None:
    exits: list[tuple[float, Event]] = [
        (6.0, FromRank(1, WorkerStopped(7))),
        (6.0, RankExited(1, 143, replace(ERROR, step=9))),
    ]
    assert (stopping := after(STOPPING, *exits)[0].rank(1)).ended_well
    assert stopping.step == 7
    assert not after(LEADS, *exits)[0].rank(1).ended_well  # nobody has asked it to


def test_a_rank_that_was_killed_is_no_cause_unless_it_has_said_something() -> None:
    killed, _ = after(FOLLOWS, (5.0, FromCommand(0, EndRun(ERROR, None))), (5.1, RankExited(3, -9, DEATH)))
    cause = killed.rank(3).cause
    assert cause is not None
    assert (cause.kind, cause.message, cause.signal) == ("Ended", "ended because another rank failed", None)
    said, _ = after(
        FOLLOWS,
        (5.0, RankErrored(3, ERROR)),
        (5.1, FromCommand(0, EndRun(ERROR, None))),
        (5.2, RankExited(3, -9, DEATH)),
    )
    assert said.rank(3).cause == ERROR


@pytest.mark.parametrize(("rank", "trains"), [(0, True), (1, False)])
def test_training_has_begun_when_rank_zero_says_so(rank: int, trains: bool) -> None:
    began, _ = after(BUILDS, (5.0, FromRank(rank, TrainingBegan(30))))
    assert (began.is_training, began.began) == (trains, 30)


def test_the_time_of_a_stop_is_that_of_its_first_signal_and_its_reason_stays() -> None:
    quits, _ = after(LEADS, (5.0, FromRank(0, DebuggerQuit(False))), (9.0, FromRank(0, DebuggerQuit(True))))
    assert quits.stop == Stop(signal.SIGINT, 5.0, at_once=True, by="quit in the debugger")
    other = FromCommand(1, SignalReceived(TERM, False))
    replaced, _ = after(LEADS, (5.0, Signalled(USR2, COMMAND)), (8.0, other))
    assert replaced.stop == Stop(TERM, 5.0)
    assert replaced.first_end_at == {1 + OTHER_COMMANDS: 8.0}


def test_a_command_that_does_not_answer_is_not_waited_for() -> None:
    hung, _ = after(LEADS, (5.0, HangFound(ERROR, [1])))
    assert hung.others == frozenset()
