"""Supervise the workers of one command: show their output, notice the first failure, end the others, leave nothing.

Used by the coordinator, in every command of a job.
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ddpexp.errors import Failure
from ddpexp.launch import WorkerRequest
from ddpexp.launch.rendezvous.wire import Meeting, Peer
from ddpexp.launch.supervise import messages
from ddpexp.launch.supervise.causes import (
    ReportedFailure,
    Worker,
    cause_of,
    log_failure,
    weight,
)
from ddpexp.launch.supervise.debug_turns import DebugTurns
from ddpexp.launch.supervise.output import Output
from ddpexp.launch.supervise.peers import Peers
from ddpexp.launch.supervise.run_end import RunEnd
from ddpexp.launch.supervise.signal_handler import COMMAND, OTHER_COMMANDS, SignalHandler
from ddpexp.launch.supervise.signals import signals_as_bytes
from ddpexp.launch.supervise.stop_agreement import Agreement
from ddpexp.launch.supervise.watchdog import Watchdog
from ddpexp.launch.supervise.worker_events import Server, WorkerEvents, WorkerReports
from ddpexp.launch.workers.lines import Lines
from ddpexp.system.process import exit_code, is_stopped
from ddpexp.system.terminal import Terminal

_TAIL_SECONDS = 0.1
_SHUTDOWN_SECONDS = 10.0  # for the other commands to end, when this one's workers have
_KILL_SECONDS = 2.0  # for the fork server to kill its workers; after that it is killed itself, and they with it


class Supervisor:
    """One command's workers, and its connections to the other commands of the job."""

    def __init__(
        self,
        server: Server,
        workers: Sequence[Worker],
        terminal: Terminal,
        meeting: Meeting | None,
        request: WorkerRequest,
        on_gpus: bool = False,
        uses_nccl: bool = False,
        terminal_descriptor: int | None = None,
    ) -> None:
        """Take over the workers, which the server starts.

        Where several commands run the job, `meeting` connects them: a failure in one ends all, and the leading one
        reports it. On a stop signal the ranks save and exit within `request.grace_seconds`; a hang ends the run after
        `request.timeout`. `terminal_descriptor`: the command's terminal, which is lent to ranks at a breakpoint.
        """
        self._server, self._workers = server, workers
        self._grace_seconds, self._step_seconds = request.grace_seconds, request.timeout.step_seconds
        self._peers = peers = Peers(meeting)
        self._agreement = Agreement([worker.page for worker in workers], peers.send)
        self._output = Output(terminal, None if peers.leads else self._forward_warning)
        self._end = RunEnd(workers, peers.leader, meeting is None or meeting.speaks)
        self._signals = SignalHandler(workers, peers, self._agreement, self._end, server.kill, self._kill_workers)
        self._watchdog = Watchdog(
            workers,
            request.timeout,
            peers.leads,
            peers.send,
            self._signals.dump,
            server=server.pid,
            on_gpus=on_gpus,
            uses_nccl=uses_nccl,
        )
        self._turns = DebugTurns(terminal_descriptor, self._output, self._end, len(workers))
        reports = WorkerReports(self._output, self._end, self._on_quit, self._turns)
        self._events = WorkerEvents(server, workers, self._end, reports, self._signals.dump)
        self._rank_zero = next((worker for worker in workers if worker.rank == 0), None)
        self._selector = selectors.DefaultSelector()
        self._reported: set[int] = set()  # ranks whose failure was reported to the leading command
        self._killed_at: float | None = None
        self._server_stopped_at: float | None = None  # when the fork server was first seen to be stopped
        self._on_message: Mapping[type[Any], Callable[[Any, Peer], None]] = {
            messages.RankFailed: lambda message, _: self._end.report(message.failure, message.weight),
            messages.RankWarned: lambda message, _: self._output.warned(message.rank, message.text),
            messages.CommandDone: self._on_command_done,
            messages.CommandStopped: self._on_command_stopped,
            messages.SignalReceived: self._on_signal_received,
            messages.StopRun: lambda message, _: self._signals.record_stop(message.signal),
            messages.LeaveNow: lambda message, _: self._signals.leave_now(message.signal),
            messages.EndRun: self._on_end_run,
            messages.BeginAgreement: self._on_agreement,
            messages.ReportBound: self._on_agreement,
            messages.CommitStep: self._on_agreement,
            messages.ReportSilence: self._on_inquiry,
            messages.BeginInquiry: self._on_inquiry,
            messages.ReportAccounts: self._on_inquiry,
        }

    # The loop.

    def run(self) -> int:
        """Supervise the workers until all have ended; return the exit code of the run.

        Raises:
            WorkerError: the first genuine failure. RefusedError: the workers refused to start.
            StoppedError: a signal to this process, another command or a rank ended the run.
        """
        with self._selector, signals_as_bytes() as signals:
            self._register(signals)
            try:
                self._watch()
                self._drain()
                self._shutdown()
            finally:
                self._turns.close()
                self._output.terminal.close()
                for worker in self._workers:
                    worker.control.channel.close()
                    worker.signals.close()
        return self._end.verdict()

    def _register(self, signals: socket.socket) -> None:
        """Register a callback for everything that can become readable; False from it means that it is closed."""
        handlers: dict[socket.socket, Callable[[], bool]] = {
            self._server.channel: self._events.dispatch,
            signals: lambda: self._on_signals(signals),
        }
        for worker in self._workers:
            handlers[worker.control.channel] = partial(self._events.on_worker_message, worker)
            handlers[worker.signals] = partial(self._on_worker_signals, worker)
        for peer in self._peers.all:
            lines = peer.lines()
            handlers[lines.channel] = partial(self._on_peer_message, peer, lines)
        for channel, handler in handlers.items():
            self._selector.register(channel, selectors.EVENT_READ, handler)

    def _poll(self) -> None:
        """Handle everything that has arrived, waiting for a moment at most."""
        for key, _ in self._selector.select(_TAIL_SECONDS):
            if not key.data():
                self._selector.unregister(key.fileobj)
        if self._peers.leads:
            self._agreement.advance(self._peers.living.keys())
        self._turns.advance()

    def _watch(self) -> None:
        """Handle events until every worker has ended."""
        while any(worker.code is None for worker in self._workers):
            self._poll()
            if self._rank_zero is not None:
                written = self._rank_zero.log.size()  # messages sent before that are in the channel, and shown first
                self._events.on_worker_message(self._rank_zero)
                self._output.lines_of(self._rank_zero, until=written, without_stacks=self._watchdog.writes_stacks)
                self._output.show_warnings()
            self._report_failures()
            self._check_server()
            self._check_hangs()
            self._enforce_deadlines()

    def _drain(self) -> None:
        """Handle what the workers have sent and written before their ends."""
        while self._end.may_be_stopped():
            self._poll()
        for worker in self._workers:
            self._events.on_worker_message(worker)
        self._report_failures()
        if self._rank_zero is not None:
            self._output.show_warnings(all_of_them=True)
            self._output.lines_of(self._rank_zero, last=True)
        for worker in self._workers:
            log_failure(worker)

    def _shutdown(self) -> None:
        """Coordinate the end with the other commands: all report to the leading one, which waits for them."""
        if not self._peers.all:
            return
        ended_badly = self._end.failed_at is not None or self._end.stop is not None
        seconds = _SHUTDOWN_SECONDS
        if self._peers.leads:
            while self._peers.living and self._end.may_learn_cause():
                self._poll()
            if ended_badly:
                self._end_others()
        else:
            self._peers.said_goodbye = True
            stop = self._end.stop
            self._peers.send(messages.CommandDone() if stop is None else messages.CommandStopped(stop.signum))
            if not ended_badly:  # else launchers may kill all other commands as soon as this one exits
                seconds = 0.0
        deadline = time.monotonic() + seconds
        while self._peers.living and time.monotonic() < deadline:
            self._poll()

    # The other commands.

    def _forward_warning(self, rank: int, text: str) -> None:
        self._peers.send_to_leader(messages.RankWarned(rank, text))

    def _report_failures(self) -> None:
        """Report every failure here to the leading command as soon as it is known."""
        if self._peers.leads:
            return
        for worker in self._workers:
            failed = worker.failure is not None or (worker.code is not None and not worker.well)
            if failed and not worker.ended and worker.rank not in self._reported and not self._end.at_once:
                self._reported.add(worker.rank)
                cause = cause_of(worker)
                self._peers.send(messages.RankFailed(cause, weight(cause)))

    def _on_peer_message(self, peer: Peer, lines: Lines) -> bool:
        """Handle what another command has sent; False when its connection is closed."""
        received, is_open = lines.read()
        for fields in received:
            message = messages.decode(fields)
            if message is not None:
                self._on_message[type(message)](message, peer)
        if not is_open and self._remove(peer.index):
            self._on_command_lost(peer)
        return is_open

    def _on_command_done(self, _message: messages.CommandDone, peer: Peer) -> None:
        self._remove(peer.index)

    def _on_command_stopped(self, message: messages.CommandStopped, peer: Peer) -> None:
        self._remove(peer.index)
        if self._end.stop is None:
            self._signals.handle(message.signal, peer.index + OTHER_COMMANDS)

    def _on_signal_received(self, message: messages.SignalReceived, peer: Peer) -> None:
        self._signals.handle(message.signal, peer.index + OTHER_COMMANDS, message.again)

    def _on_end_run(self, message: messages.EndRun, _peer: Peer) -> None:
        if message.signal is not None:
            self._signals.record_stop(message.signal)
        if message.cause is not None:
            self._end.reported.append(ReportedFailure(message.cause, -1, time.monotonic()))
        self._kill_workers()

    def _on_agreement(self, message: messages.AgreementMessage, peer: Peer) -> None:
        self._agreement.on_message(message, peer.index)

    def _on_inquiry(self, message: messages.InquiryMessage, peer: Peer) -> None:
        self._watchdog.on_message(message, peer.index)

    def _on_command_lost(self, peer: Peer) -> None:
        if self._peers.leads:
            text = (
                f"the command of rank {peer.first_rank} on {peer.host} is gone: it was killed, or its host is cut off"
            )
            self._end.report(Failure(rank=peer.first_rank, host=peer.host, kind="CommandLost", message=text), 1)
        else:
            self._end.leader_lost = not self._peers.said_goodbye
            self._kill_workers()

    def _remove(self, number: int) -> bool:
        """Record that another command has ended; return whether that is new."""
        self._agreement.forget(number)
        return self._peers.living.pop(number, None) is not None

    # Signals.

    def _on_signals(self, signals: socket.socket) -> bool:
        for number in signals.recv(64):
            if number != signal.SIGINT or not self._turns.interrupt():
                self._signals.handle(number, COMMAND)
        return True

    def _on_quit(self, at_once: bool) -> None:
        self._turns.on_quit()
        self._signals.quit_debugger(at_once)

    def _on_worker_signals(self, worker: Worker) -> bool:
        """Handle the signals that a rank forwards; False when it has ended."""
        numbers = worker.signals.recv(64)
        for number in numbers:
            self._signals.handle_forwarded(number, worker)
        return bool(numbers)

    # Deadlines.

    def _enforce_deadlines(self) -> None:
        """Kill the workers that do not end in time after a failure or a stop, and a fork server that does not."""
        if self._end.is_overdue(self._grace_seconds):
            self._kill_workers()
        if self._killed_at is not None and time.monotonic() - self._killed_at > _KILL_SECONDS:
            self._server.destroy()

    def _check_server(self) -> None:
        """While the fork server is stopped and reports nothing, detect ended ranks here, and warn after a while.

        Ranks that train need no server. If one hangs meanwhile, the watchdog notices.
        """
        pid = self._server.pid
        if not is_stopped(pid):
            self._server_stopped_at = None
            return
        now = time.monotonic()
        self._server_stopped_at = self._server_stopped_at or now
        for worker in self._workers:
            if worker.pid is not None and (code := exit_code(worker.pid)) is not None:
                self._events.on_exit(worker, code)
        if now - self._server_stopped_at > self._step_seconds:
            self._output.line(
                f"ddpexp: warning: the fork server, process {pid}, is stopped (by SIGSTOP or a debugger). The ranks "
                f"train without it; `kill -CONT {pid}` continues it."
            )

    def _check_hangs(self) -> None:
        """End the run when a rank hangs. A stop or a failure has its own deadline, a debugger has none."""
        if self._turns.are_active:
            self._watchdog.forget()
            return
        if self._end.stop is not None or self._end.failed_at is not None or self._killed_at is not None:
            return
        cause = self._watchdog.look(self._peers.living)
        if cause is not None:
            for number in self._watchdog.absent:
                self._remove(number)  # do not wait for it at the end
            self._end.report(cause, 0)
            self._kill_workers()
        elif self._watchdog.leader_is_silent:
            self._end.fail(time.monotonic())
            self._end.leader_lost = True
            self._peers.living.clear()
            self._kill_workers()

    def _kill_workers(self) -> None:
        """Kill the remaining workers, after a failure elsewhere or a stop that they did not follow in time."""
        if self._killed_at is not None:
            return
        for worker in self._workers:
            worker.ended = worker.code is None
        self._server.kill(signal.SIGKILL)
        self._killed_at = time.monotonic()
        self._end_others()

    def _end_others(self) -> None:
        """Make the other commands kill their workers, and send them the cause, which all of them report alike."""
        stop = self._end.stop
        self._peers.send_to_others(messages.EndRun(self._end.first_cause(), None if stop is None else stop.signum))
