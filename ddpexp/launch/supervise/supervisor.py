"""Supervise the workers of one command: show their output, notice the first failure, end the others, leave nothing.

Used by the coordinator, in every command of a job. What happens becomes events, on which `decide` decides.
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ddpexp.errors import EXIT_FAILED, Failure
from ddpexp.launch import Layout, WorkerRequest
from ddpexp.launch.rendezvous.wire import Meeting, Peer
from ddpexp.launch.supervise import events, messages
from ddpexp.launch.supervise.debug_turns import DebugTurns
from ddpexp.launch.supervise.decider import Decider
from ddpexp.launch.supervise.inbox import Inbox
from ddpexp.launch.supervise.output import Output
from ddpexp.launch.supervise.reports import Reports
from ddpexp.launch.supervise.signals import signals_as_bytes
from ddpexp.launch.supervise.state import Rank, Stage, State
from ddpexp.launch.supervise.verdict import exit_code_of
from ddpexp.launch.supervise.watchdog import Watchdog
from ddpexp.launch.supervise.worker import Worker
from ddpexp.launch.workers.client import check_answer
from ddpexp.launch.workers.lines import Lines
from ddpexp.system.oom import Memory
from ddpexp.system.process import exit_code, is_stopped
from ddpexp.system.terminal import Terminal

_POLL_SECONDS = 0.1


class Server(Protocol):
    """What starts workers on request and reports their ends."""

    channel: socket.socket
    memory: Memory
    pid: int

    def receive(self) -> dict[str, Any] | None:
        """Return the next answer, or None when the server is gone."""

    def kill(self, signum: int, spared: int | None = None) -> None:
        """Send a signal to every living worker except the process `spared`."""

    def lost(self) -> tuple[str, int | None]:
        """Return a text on how it ended, once it is gone, and the signal that killed it."""

    def destroy(self) -> None:
        """Kill the server, and with it every worker."""


class Supervisor:
    """One command's workers, and its connections to the other commands of the job."""

    def __init__(
        self,
        server: Server,
        workers: Sequence[Worker],
        terminal: Terminal,
        meeting: Meeting | None,
        request: WorkerRequest,
        layout: Layout | None = None,
        terminal_descriptor: int | None = None,
        requests: Path | None = None,
    ) -> None:
        """Take over the workers, which the server starts.

        Where several commands run the job, `meeting` connects them: a failure in one ends all, and the leading one
        reports it. On a stop signal the ranks save and exit within `request.grace_seconds`; a hang ends the run after
        `request.timeout`. `terminal_descriptor`: the command's terminal, which is lent to ranks at a breakpoint.
        `requests`: the folder of other commands' requests.
        """
        self._server = server
        self._workers = workers
        self._meeting = meeting or Meeting(0)
        peers = {peer.index: peer for peer in self._meeting.peers}
        self._speaks = self._meeting.speaks
        self._step_seconds = request.timeout.step_seconds
        leads = self._meeting.leads
        state = State(
            ranks=tuple(Rank(worker.rank) for worker in workers),
            first_rank=workers[0].rank,
            grace_seconds=request.grace_seconds,
            leader_host=None if leads else self._meeting.peers[0].host,
            others=frozenset(peers),
        )
        self._decider = decider = Decider(
            state,
            workers,
            send=self._send,
            send_signal=server.kill,
            dismiss=self._dismiss,
            kill_workers=partial(server.kill, signal.SIGKILL),
            kill_server=server.destroy,
            show_last_output=self._show_last_output,
        )
        self._output = Output(terminal, None if leads else self._forward_warning)
        self._watchdog = Watchdog(
            workers,
            request.timeout,
            leads,
            self._send,
            decider.dump,
            lives=lambda rank: decider.state.lives(rank),
            server=server.pid,
            peers=peers,
            on_gpus=layout is not None and layout.device == "cuda",
            uses_nccl=layout is not None and layout.backend == "nccl" and layout.world_size > 1,
        )
        self._turns = DebugTurns(terminal_descriptor, self._output, lambda: decider.state, len(workers))
        self._inbox = Inbox(decider, requests)
        self._reports = Reports(decider, server.memory, self._inbox, self._output, self._turns)
        self._rank_zero = next((worker for worker in workers if worker.rank == 0), None)
        self._selector = selectors.DefaultSelector()
        self._server_stopped_at: float | None = None  # when the fork server was first seen to be stopped

    def run(self) -> int:
        """Supervise the workers until all have ended; return the exit code of the run.

        Raises:
            WorkerError: the first genuine failure. RefusedError: the workers refused to start.
            StoppedError: a signal to this process, another command or a rank ended the run.
        """
        with self._selector, signals_as_bytes() as signals:
            self._register(signals)
            try:
                while self._decider.state.stage is not Stage.OVER:
                    self._poll()
                    if self._decider.state.stage is Stage.WATCHING:
                        self._show_output()
                        self._check_server()
                        self._check_hangs()
                        self._inbox.look()
            finally:
                self._inbox.close()
                self._turns.close()
                self._output.terminal.close()
                for worker in self._workers:
                    worker.control.channel.close()
                    worker.signals.close()
        return exit_code_of(self._decider.state, self._workers, self._speaks)

    def _register(self, signals: socket.socket) -> None:
        """Register a callback for everything that can become readable; False from it means that it is closed."""
        handlers: dict[socket.socket, Callable[[], bool]] = {
            self._server.channel: self._on_server,
            signals: lambda: self._on_signals(signals),
        }
        for worker in self._workers:
            handlers[worker.control.channel] = partial(self._reports.read, worker)
            handlers[worker.signals] = partial(self._reports.read_signals, worker)
        for peer in self._meeting.peers:
            lines = peer.lines()
            handlers[lines.channel] = partial(self._on_peer, peer, lines)
        for channel, handler in handlers.items():
            self._selector.register(channel, selectors.EVENT_READ, handler)

    def _poll(self) -> None:
        """Handle everything that has arrived, waiting for a moment at most."""
        ready = self._selector.select(_POLL_SECONDS)
        self._decider.look_at_rank_zero()  # first: on a signal it matters whether there is something to save
        for key, _ in ready:
            if not key.data():
                self._selector.unregister(key.fileobj)
        self._decider.take(events.Tick())
        self._turns.advance()

    # This command's workers.

    def _on_server(self) -> bool:
        """Handle one answer of the fork server; False when it is gone, and every worker with it."""
        answer = self._server.receive()
        if answer is None:
            self._on_server_lost()
            return False
        check_answer(answer)
        if answer["kind"] == "started":
            self._worker_of(answer["rank"]).pid = answer["pid"]
        elif answer["kind"] == "failed":  # the server could not fork
            self._on_no_process(self._worker_of(answer["rank"]), EXIT_FAILED, answer["error"], answer["message"])
        elif answer["kind"] == "exit":
            worker = next(worker for worker in self._workers if worker.pid == answer["pid"])
            self._reports.on_exit(worker, answer["code"])
        return True

    def _worker_of(self, rank: int) -> Worker:
        return self._workers[rank - self._workers[0].rank]

    def _on_server_lost(self) -> None:
        for worker in self._workers:
            if self._decider.state.rank(worker.rank).code is None:
                text, signum = self._server.lost()
                self._reports.read(worker)
                self._on_no_process(worker, -signal.SIGKILL, "ServerLost", text, signum)

    def _on_no_process(self, worker: Worker, code: int, kind: str, text: str, signum: int | None = None) -> None:
        """Handle the end of a worker for which the server is responsible: its log says nothing of it."""
        seen = replace(worker.failure_seen(kind, text, signum), traceback=None)
        if not self._decider.state.rank(worker.rank).was_killed:
            worker.log_failure(seen)
        self._decider.take(events.RankExited(worker.rank, code, seen))

    def _on_signals(self, signals: socket.socket) -> bool:
        for number in signals.recv(64):
            if number != signal.SIGINT or not self._turns.interrupt():
                self._decider.take(events.Signalled(number, events.COMMAND))
        return True

    def _dismiss(self) -> None:
        for worker in self._workers:
            worker.page.stop.leave_at_once()
        self._server.kill(signal.SIGTERM)

    def _show_output(self) -> None:
        if self._rank_zero is not None:
            written = self._rank_zero.log.size()  # messages sent before that are in the channel, and shown first
            self._reports.read(self._rank_zero)
            self._output.lines_of(self._rank_zero, until=written, without_stacks=self._watchdog.writes_stacks)
            self._output.show_warnings()

    def _show_last_output(self) -> None:
        if self._rank_zero is not None:
            self._output.show_warnings(all_of_them=True)
            self._output.lines_of(self._rank_zero, last=True)
        for worker in self._workers:
            worker.log_failure(self._decider.state.rank(worker.rank).failure)

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
            is_known = self._decider.state.rank(worker.rank).code is not None
            if worker.pid is not None and not is_known and (code := exit_code(worker.pid)) is not None:
                self._reports.on_exit(worker, code)
        if now - self._server_stopped_at > self._step_seconds:
            self._output.line(
                f"ddpexp: warning: the fork server, process {pid}, is stopped (by SIGSTOP or a debugger). The ranks "
                f"train without it; `kill -CONT {pid}` continues it."
            )

    def _check_hangs(self) -> None:
        """Look for a rank that hangs. A stop or a failure has its own deadline, a debugger has none."""
        if self._turns.are_active:
            self._watchdog.forget()
            return
        state = self._decider.state
        if state.is_ending:
            return
        cause = self._watchdog.look(state.others)
        if cause is not None:
            self._decider.take(events.HangFound(cause, self._watchdog.absent))
        elif self._watchdog.leader_is_silent:
            self._decider.take(events.LeaderSilent())

    # The other commands.

    def _send(self, message: messages.PeerMessage) -> None:
        self._meeting.send(messages.encode(message))

    def _forward_warning(self, rank: int, text: str) -> None:
        self._send(messages.RankWarned(rank, text))

    def _on_peer(self, peer: Peer, lines: Lines) -> bool:
        """Handle what another command has sent; False when its connection is closed."""
        received, is_open = lines.read()
        for fields in received:
            message = messages.decode(fields)
            if isinstance(message, messages.RankWarned):
                self._output.warned(message.rank, message.text)
            elif isinstance(message, messages.InquiryMessage):
                self._watchdog.on_message(message, peer.index)
            elif message is not None:
                self._decider.take(events.FromCommand(peer.index, message))
        if not is_open:
            text = (
                f"the command of rank {peer.first_rank} on {peer.host} is gone: it was killed, or its host is cut off"
            )
            failure = Failure(rank=peer.first_rank, host=peer.host, kind="CommandLost", message=text)
            self._decider.take(events.CommandLost(peer.index, failure))
        return is_open
