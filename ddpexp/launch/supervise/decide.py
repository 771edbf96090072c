"""The decisions of a command: `decide` maps its state, an event and the time to the next state and to actions.

It has no side effects: the supervisor and `launcher=inline` pass it the events and perform the actions. The table in
docs/launchers.md lists the effect of each signal.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddpexp.errors import EXIT_FAILED, Failure
from ddpexp.launch.supervise import agreement, events, messages
from ddpexp.launch.supervise.events import COMMAND, OTHER_COMMANDS, Action, Event
from ddpexp.launch.supervise.mismatch import is_mismatch
from ddpexp.launch.supervise.severity import Severity
from ddpexp.launch.supervise.signals import END_SIGNALS
from ddpexp.launch.supervise.state import Agreement, Rank, Report, Stage, State, Stop
from ddpexp.launch.workers.page import What

_REPEAT_SECONDS = 2.0  # signals within this time count as one
_KILL_SECONDS = 2.0  # for the fork server to kill its workers; after that it is killed itself, and they with it
_PARTING_SECONDS = 10.0  # for the other commands to end, when this one's ranks have


def decide(state: State, event: Event, now: float) -> tuple[State, Sequence[Action]]:
    """Return the state after an event, and the actions to perform in order."""
    decision = _Transition(state, now)
    _ON_EVENT[type(event)](decision, event)
    decision.advance()
    return decision.state, decision.actions


class _Transition:
    """The state and the actions of one decision, as they come about."""

    def __init__(self, state: State, now: float) -> None:
        self.state = state
        self.now = now
        self.actions: list[Action] = []

    def advance(self) -> None:
        """Do what follows from the state: report failures, begin agreements, go to the next stage."""
        if self.state.leads:
            self._set(agreement=agreement.wish(self.state.agreement, *self.state.wish))
            if self.state.rank_zero_has_stepped:  # before its first step a rank may not know its position
                self._agree(*agreement.begin(self.state.agreement, self.state.others))
        else:
            self._report_failures()
        if self.state.stage is Stage.WATCHING and all(rank.code is not None for rank in self.state.ranks):
            self._set(stage=Stage.SETTLING)
        if self.state.stage is Stage.SETTLING and not self.state.may_be_stopped(self.now):
            self._part()
        if self.state.stage is Stage.PARTING:
            self._wait_for_others()

    # Events of this command's ranks.

    def on_rank_message(self, event: events.FromRank) -> None:
        """Note what a rank reports."""
        message = event.message
        if isinstance(message, messages.TrainingBegan):
            self._set(began=message.step, rank_zero_trains=self.state.rank_zero_trains or event.rank == 0)
        elif isinstance(message, messages.WorkerDone):
            self._set_rank(event.rank, is_done=True)
        elif isinstance(message, messages.WorkerStopped):
            self._set_rank(event.rank, has_stopped=self.state.stop is not None, step=message.step)
        else:
            self._quit_debugger(message.at_once)

    def on_rank_errored(self, event: events.RankErrored) -> None:
        """Note a rank's own failure."""
        self._set_rank(event.rank, failure=event.failure, failed_at=self.now)
        self._fail(Severity.of(event.failure))

    def on_rank_exited(self, event: events.RankExited) -> None:
        """Note the end of a rank's process; it may have been noticed before."""
        rank = self.state.rank(event.rank)
        if rank.code is not None:
            return
        end = event.seen
        if rank.was_killed:
            why = "ended because another rank failed"
            end = replace(end, kind="Ended", message=why, signal=None, exit_code=EXIT_FAILED)
        self._set_rank(
            event.rank,
            code=event.code,
            end=end,
            failed_at=rank.failed_at or self.now,
            step=rank.step if rank.has_stopped else end.step,
        )
        if (cause := self.state.rank(event.rank).cause) is not None:
            self._fail(Severity.of(cause))
            if is_mismatch(cause):
                self.actions.append(events.DumpStacks())  # the stacks of the other ranks show which one is wrong

    def on_rank_zero_moved(self, event: events.RankZeroMoved) -> None:
        """Note what rank zero wants, and that it has a step at which it can save."""
        self._set(rank_zero_has_stepped=event.has_stepped, wish=event.wish)

    def on_bound(self, event: events.BoundRead) -> None:
        """Report the boundary of this command, or count it."""
        if self.state.leads:
            self._agree(*agreement.answer(self.state.agreement, COMMAND, event.number, event.step))
        else:
            self._send(messages.ReportBound(event.number, event.step))

    # Events of other commands.

    def on_command_message(self, event: events.FromCommand) -> None:
        """Handle what another command has sent."""
        _ON_MESSAGE[type(event.message)](self, event.message, event.command)

    def on_rank_failed(self, message: messages.RankFailed, _command: int) -> None:
        """Note a failure of another command's rank."""
        self._report(message.failure, message.severity)

    def on_command_done(self, _message: messages.CommandDone, command: int) -> None:
        """Wait for that command no longer."""
        self._forget(command)

    def on_command_stopped(self, message: messages.CommandStopped, command: int) -> None:
        """Note a signal that reached only another command, which has ended by it."""
        self._forget(command)
        if self.state.stop is None:
            self._on_end_signal(message.signal, command + OTHER_COMMANDS)

    def on_signal_received(self, message: messages.SignalReceived, command: int) -> None:
        """Handle a signal that another command has received."""
        self._on_signal(message.signal, command + OTHER_COMMANDS, message.again)

    def on_stop_run(self, message: messages.StopRun, _command: int) -> None:
        """Stop at the step that the agreement names."""
        self._note_stop(message.signal)

    def on_leave_now(self, message: messages.LeaveNow, _command: int) -> None:
        """Stop without saving."""
        self._dismiss(message.signal)

    def on_end_run(self, message: messages.EndRun, _command: int) -> None:
        """End as the leading command decides; it decides again when it learns of a more genuine cause."""
        if message.signal is not None:
            self._note_stop(message.signal)
        self._set(decision=message)
        self._kill()

    def on_begin_agreement(self, message: messages.BeginAgreement, _command: int) -> None:
        """Begin an agreement that the leading command has begun."""
        self._set(agreement=Agreement(number=message.number))
        self.actions.append(events.BeginBoundary(message.number))

    def on_report_bound(self, message: messages.ReportBound, command: int) -> None:
        """Count another command's boundary."""
        self._agree(*agreement.answer(self.state.agreement, command, message.number, message.step))

    def on_commit_step(self, message: messages.CommitStep, _command: int) -> None:
        """Tell the ranks the step."""
        self.actions.append(events.CommitBoundary(message))

    def on_command_lost(self, event: events.CommandLost) -> None:
        """End the run without that command, unless it has said how it ended."""
        if event.command not in self.state.others:
            return
        self._forget(event.command)
        if self.state.leads:
            self._report(event.failure, Severity.ERROR)
        elif self.state.stage is not Stage.PARTING:
            self._set(leader_lost=self.state.decision is None)
            self._kill()
        elif self.state.failed_at is not None:  # it knows how this command ended, and would have decided
            self._set(leader_lost=self.state.decision is None)

    def on_hang(self, event: events.HangFound) -> None:
        """End the run because of a rank that hangs."""
        for command in event.absent:
            self._forget(command)  # do not wait for it at the end
        self._report(event.failure, Severity.DEATH)
        self._kill()

    def on_leader_silent(self, _event: events.LeaderSilent) -> None:
        """End without the leading command."""
        self._fail(Severity.DISCONNECTION)
        self._set(leader_lost=True, others=frozenset())
        self._kill()

    # Signals.

    def on_signalled(self, event: events.Signalled) -> None:
        """Handle a signal to this command or a rank; ranks that are to exit at once forward the signal for that."""
        if event.source == COMMAND or not self.state.stops_at_once:
            self._on_signal(event.number, event.source)

    def on_requested(self, event: events.Requested) -> None:
        """Do what a person requests: in the leading command."""
        if event.kind == "stacks":
            self._dump_all(COMMAND)
        elif event.kind == "stop":
            if self.state.stop is None:
                self._request_stop(signal.SIGTERM)
                self._name_stop("stopped by ddpexp stop")
        elif self.state.is_training:
            wanted: What = "save" if event.kind == "save" else "profile"
            self._set(agreement=agreement.want(self.state.agreement, wanted, event.steps))

    def _on_signal(self, number: int, source: int, again: bool = False) -> None:
        if number not in (signal.SIGUSR1, signal.SIGQUIT):
            self._on_end_signal(number, source, again)
        elif self.now - self.state.handled_at.get(number, -math.inf) > _REPEAT_SECONDS:
            self._set(handled_at={**self.state.handled_at, number: self.now})
            self._request_save() if number == signal.SIGUSR1 else self._dump_all(source)

    def _on_end_signal(self, number: int, source: int, again: bool = False) -> None:
        """Stop the run, or end it at once on a second signal.

        Schedulers send a signal to all processes at once, or to some of them later, and some commands forward theirs:
        so the first one from each source counts as the same. `again`: another command reports a second one.
        """
        stop = self.state.stop
        if number in END_SIGNALS:
            first = self.state.first_end_at.get(source, self.now)
            again = again or self.now - first > _REPEAT_SECONDS
            self._set(first_end_at={**self.state.first_end_at, source: first})
        if stop is not None and again:
            self._send_to_leader(messages.SignalReceived(number, again))
            self._kill()
        elif stop is None:
            self._request_stop(number)
        elif stop.signum == signal.SIGUSR2 != number and (self.state.leads or self.state.stage is not Stage.PARTING):
            self._request_stop(number)  # it was stopping to be resumed later, and now it ends for good

    def _request_stop(self, number: int) -> None:
        """Stop the run: at an agreed step, or at once where there is nothing to save."""
        if self.state.leads and self.state.stop is None and not self.state.is_training:
            self._send(messages.LeaveNow(number))
            self._dismiss(number)
            return
        self._note_stop(number)
        self._send(messages.StopRun(number) if self.state.leads else messages.SignalReceived(number, False))
        if self.state.leads:
            self._set(agreement=agreement.want(self.state.agreement, "stop"))

    def _note_stop(self, number: int, at_once: bool = False) -> None:
        """Note the signal that stops the run; the time counts from the first one."""
        stop = self.state.stop or Stop(number, self.now)
        self._set(stop=replace(stop, signum=number, at_once=stop.at_once or at_once))
        self.actions.append(events.ShowStop(number))
        if self.state.leads and self.state.decision is not None:
            self._end_others()  # what looked like a failure may be a part of the stop

    def _name_stop(self, by: str) -> None:
        assert self.state.stop is not None
        self._set(stop=replace(self.state.stop, by=by))

    def _dismiss(self, number: int) -> None:
        """End the ranks, which have nothing to save yet."""
        self._note_stop(number, at_once=True)
        self.actions.append(events.DismissRanks())

    def _quit_debugger(self, at_once: bool) -> None:
        """Stop the run because the user has quit a debugger, as by Ctrl-C; `at_once`: without saving."""
        if self.state.stop is None:
            self._request_stop(signal.SIGINT)
            self._name_stop("quit in the debugger")
        if at_once and not self.state.stops_at_once:
            self._dismiss(signal.SIGINT)

    def _request_save(self) -> None:
        """Make all ranks save and continue."""
        self._send_to_leader(messages.SignalReceived(signal.SIGUSR1, False))
        if self.state.leads and self.state.is_training:
            self._set(agreement=agreement.want(self.state.agreement, "save"))

    def _dump_all(self, source: int) -> None:
        self.actions.append(events.DumpStacks(source))
        self._send(messages.SignalReceived(signal.SIGQUIT, False))

    # Time.

    def on_tick(self, _event: events.Tick) -> None:
        """Kill the ranks that do not end in time after a failure or a stop, and a fork server that does not."""
        if self.state.stage is not Stage.WATCHING:
            return
        if self.state.is_overdue(self.now):
            self._kill()
        if self.state.killed_at is not None and self.now - self.state.killed_at > _KILL_SECONDS:
            self.actions.append(events.KillServer())

    # What follows.

    def _report_failures(self) -> None:
        """Report every failure here to the leading command as soon as it is known."""
        if self.state.stops_at_once:
            return
        for rank in self.state.ranks:
            if rank.is_reported or (cause := rank.cause) is None:
                continue
            self._set_rank(rank.number, is_reported=True)
            if (severity := Severity.of(cause)) is not Severity.ENDED:
                self._send(messages.RankFailed(cause, severity))

    def _kill(self) -> None:
        """Kill the remaining ranks, after a failure elsewhere or a stop that they did not follow in time."""
        if self.state.killed_at is not None:
            return
        ranks = tuple(replace(rank, was_killed=rank.code is None) for rank in self.state.ranks)
        self._set(ranks=ranks, killed_at=self.now)
        self.actions.append(events.KillRanks())
        if self.state.leads:
            self._end_others()

    def _end_others(self) -> None:
        """Make the other commands kill their ranks, and tell them how the run ends, which all of them report alike."""
        self._set(decision=self.state.end_of_run())
        assert self.state.decision is not None
        self._send(self.state.decision)

    def _part(self) -> None:
        """Tell the leading command how this one ended; one that is lost could wake, and take that for a good end."""
        self._set(stage=Stage.PARTING)
        self.actions.append(events.ShowLastOutput())
        if not self.state.leader_lost:
            stop = self.state.stop
            self._send_to_leader(messages.CommandDone() if stop is None else messages.CommandStopped(stop.signum))

    def _wait_for_others(self) -> None:
        """Wait for the other commands, after a failure or a stop for a while; until all have ended, if this one leads.

        Launchers may kill all other commands as soon as one exits.
        """
        state = self.state
        if state.parting_until is None and not (state.leads and state.others and state.may_learn_cause(self.now)):
            ended_badly = state.failed_at is not None or state.stop is not None
            if ended_badly and state.leads:
                self._end_others()
            self._set(parting_until=self.now + (_PARTING_SECONDS if ended_badly or state.leads else 0.0))
        until = self.state.parting_until
        if not state.others or (until is not None and self.now >= until):
            self._set(stage=Stage.OVER)

    def _agree(self, next_agreement: Agreement, actions: Sequence[Action]) -> None:
        self._set(agreement=next_agreement)
        self.actions += actions

    def _forget(self, command: int) -> None:
        """Note that another command has ended."""
        self._set(others=self.state.others - {command})
        if self.state.leads:
            self._agree(*agreement.forget(self.state.agreement, command))

    def _report(self, failure: Failure, severity: Severity) -> None:
        """Note a failure that is not one of this command's ranks'."""
        self._set(reports=(*self.state.reports, Report(failure, severity, self.now)))
        self._fail(severity)

    def _fail(self, severity: Severity) -> None:
        """Note the time of the first failure; tell the other commands of a more genuine one than before."""
        if self.state.failed_at is None:
            self._set(failed_at=self.now)
        decision = self.state.decision
        known = Severity.ENDED if decision is None or decision.cause is None else Severity.of(decision.cause)
        decides = self.state.leads and (decision is not None or self.state.stage is Stage.PARTING)
        if decides and severity < known:
            self._end_others()

    def _send(self, message: messages.PeerMessage) -> None:
        self.actions.append(events.Send(message))

    def _send_to_leader(self, message: messages.PeerMessage) -> None:
        if not self.state.leads:
            self._send(message)

    def _set(self, **fields: Any) -> None:
        self.state = replace(self.state, **fields)

    def _set_rank(self, number: int, **fields: Any) -> None:
        rank: Rank = replace(self.state.rank(number), **fields)
        place = number - self.state.first_rank
        self._set(ranks=(*self.state.ranks[:place], rank, *self.state.ranks[place + 1 :]))


_ON_EVENT: Mapping[type[Event], Callable[[_Transition, Any], None]] = {
    events.FromRank: _Transition.on_rank_message,
    events.RankErrored: _Transition.on_rank_errored,
    events.RankExited: _Transition.on_rank_exited,
    events.RankZeroMoved: _Transition.on_rank_zero_moved,
    events.BoundRead: _Transition.on_bound,
    events.Signalled: _Transition.on_signalled,
    events.Requested: _Transition.on_requested,
    events.FromCommand: _Transition.on_command_message,
    events.CommandLost: _Transition.on_command_lost,
    events.HangFound: _Transition.on_hang,
    events.LeaderSilent: _Transition.on_leader_silent,
    events.Tick: _Transition.on_tick,
}
_ON_MESSAGE: Mapping[type[messages.PeerMessage], Callable[[_Transition, Any, int], None]] = {
    messages.RankFailed: _Transition.on_rank_failed,
    messages.CommandDone: _Transition.on_command_done,
    messages.CommandStopped: _Transition.on_command_stopped,
    messages.SignalReceived: _Transition.on_signal_received,
    messages.StopRun: _Transition.on_stop_run,
    messages.LeaveNow: _Transition.on_leave_now,
    messages.EndRun: _Transition.on_end_run,
    messages.BeginAgreement: _Transition.on_begin_agreement,
    messages.ReportBound: _Transition.on_report_bound,
    messages.CommitStep: _Transition.on_commit_step,
}
