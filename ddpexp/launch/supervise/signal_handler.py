"""Handle the signals of a run, whichever process of the job received them; used by the supervisor."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence

from ddpexp.launch.supervise.causes import Worker
from ddpexp.launch.supervise.messages import LeaveNow, SignalReceived, StopRun
from ddpexp.launch.supervise.peers import Peers
from ddpexp.launch.supervise.run_end import RunEnd
from ddpexp.launch.supervise.signals import END_SIGNALS
from ddpexp.launch.supervise.stop_agreement import Agreement
from ddpexp.launch.workers.control import SIGNALS

COMMAND, OTHER_COMMANDS = -1, 1 << 32  # sources of signals besides ranks; the other command's number is added
_REPEAT_SECONDS = 2.0  # signals within this time count as one


class SignalHandler:
    """Saves, stops or dumps stacks, as the table in docs/launchers.md says."""

    def __init__(
        self,
        workers: Sequence[Worker],
        peers: Peers,
        agreement: Agreement,
        end: RunEnd,
        send_signal: Callable[[int, int | None], None],
        kill_workers: Callable[[], None],
    ) -> None:
        """`send_signal` sends one to all workers but the given process."""
        self._workers = workers
        self._peers = peers
        self._agreement = agreement
        self._end = end
        self._send_signal, self._kill_workers = send_signal, kill_workers
        self._handled_at: dict[int, float] = {}  # when each of the signals that end nothing was handled last
        self._first_end: dict[int, float] = {}  # when the first signal to end came from each source

    def handle(self, number: int, source: int, again: bool = False) -> None:
        """Handle a signal that any process of the job received; `source` is a rank, or a constant above.

        Schedulers send a signal to all processes at once, or to some of them later, and some commands forward theirs:
        so the first one from each source counts as the same. `again`: another command reports a second one.
        """
        now = time.monotonic()
        if number in (signal.SIGUSR1, signal.SIGQUIT):
            if now - self._handled_at.get(number, -math.inf) > _REPEAT_SECONDS:
                self._handled_at[number] = now
                self._request_save() if number == signal.SIGUSR1 else self._dump_all(source)
            return
        if number in END_SIGNALS:
            again = again or now - self._first_end.setdefault(source, now) > _REPEAT_SECONDS
        stop = self._end.stop
        if stop is not None and again:
            self._peers.send_to_leader(SignalReceived(number, again))
            self._kill_workers()
        elif stop is None or (stop.signum == signal.SIGUSR2 != number and not self._peers.said_goodbye):
            self._request_stop(number, is_replacement=stop is not None)

    def handle_forwarded(self, number: int, worker: Worker) -> None:
        """Handle a signal that a rank received and forwards, except for those that it got from here."""
        if number == signal.SIGQUIT and worker.dumps:
            worker.dumps -= 1
        elif number in SIGNALS and not self._end.at_once:
            self.handle(number, worker.rank)

    def record_stop(self, number: int) -> None:
        """Record the signal that stops the run, for this command and its ranks."""
        self._end.stop_by(number)
        for worker in self._workers:
            worker.page.stop.request(number)

    def quit_debugger(self, at_once: bool) -> None:
        """Stop the run because the user has quit a debugger, as by Ctrl-C; `at_once`: without saving."""
        if self._end.stop is None:
            self._end.stopped_by = "quit in the debugger"
            self._request_stop(signal.SIGINT, is_replacement=False)
        if at_once and not self._end.at_once:
            self.leave_now(signal.SIGINT)

    def leave_now(self, number: int) -> None:
        """End the workers, which have nothing to save yet."""
        self.record_stop(number)
        self._end.stop_at_once(number)
        for worker in self._workers:
            worker.page.stop.leave_at_once()
        self._send_signal(signal.SIGTERM, None)

    def dump(self, source: int = COMMAND) -> None:
        """Make all ranks of this command dump their stacks; a rank that received the signal itself already has."""
        for worker in self._workers:
            worker.dumps += worker.rank != source
        spared = next((worker.pid for worker in self._workers if worker.rank == source), None)
        self._send_signal(signal.SIGQUIT, spared)

    def _dump_all(self, source: int) -> None:
        self.dump(source)
        self._peers.send(SignalReceived(signal.SIGQUIT, False))

    def _request_save(self) -> None:
        """Make all ranks save and continue."""
        self._peers.send_to_leader(SignalReceived(signal.SIGUSR1, False))
        if self._peers.leads and self._is_training():
            self._agreement.want("save")

    def _request_stop(self, number: int, is_replacement: bool) -> None:
        """Stop the run: at an agreed step, or at once where there is nothing to save.

        `is_replacement`: the run was stopping by SIGUSR2, to be resumed later, and now it ends for good.
        """
        self.record_stop(number)
        self._peers.send_to_leader(SignalReceived(number, False))
        if self._peers.leads and (is_replacement or self._is_training()):
            self._peers.send(StopRun(number))
            self._agreement.want("stop")
        elif self._peers.leads:
            self._peers.send(LeaveNow(number))
            self.leave_now(number)

    def _is_training(self) -> bool:
        """Return whether the training has begun, according to rank zero: before, there is nothing to save."""
        first = self._workers[0]
        return first.rank == 0 and (first.trains or first.page.status.step is not None)
