"""The reports of a command's workers: messages and signals become events, or go to the terminal."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from ddpexp.errors import Failure
from ddpexp.launch.supervise import events, messages
from ddpexp.launch.supervise.debug_turns import DebugTurns
from ddpexp.launch.supervise.decider import Decider
from ddpexp.launch.supervise.inbox import Inbox
from ddpexp.launch.supervise.output import Output
from ddpexp.launch.supervise.worker import Worker
from ddpexp.launch.workers.control import SIGNALS
from ddpexp.system.oom import Memory

_LOADER_KILLED = "killed by signal: Killed"  # torch's message on a DataLoader worker


class Reports:
    """Reads the channels of workers."""

    def __init__(
        self,
        decider: Decider,
        memory: Memory,
        inbox: Inbox,
        output: Output | None = None,
        turns: DebugTurns | None = None,
    ) -> None:
        """Show progress and warnings on `output`; None where the worker itself does, and has the terminal."""
        self._decider = decider
        self._memory = memory
        self._on_message: dict[type[Any], Callable[[Worker, Any], None]] = {
            messages.TrainingBegan: self._on_event,
            messages.WorkerDone: self._on_event,
            messages.WorkerStopped: self._on_event,
            messages.DebuggerQuit: self._on_event,
            messages.Errored: self._on_errored,
            messages.Profiled: lambda _worker, message: inbox.on_profiled(message),
        }
        if turns is not None:
            self._on_message |= {
                messages.TerminalRequested: turns.on_request,
                messages.TerminalReturned: turns.on_return,
                messages.DebuggerQuit: partial(self._on_debugger_quit, turns),
            }
        if output is not None:
            self._on_message |= {
                messages.Progress: partial(_on_progress, output),
                messages.Activity: output.activity,
                messages.Warned: lambda worker, message: output.warned(worker.rank, message.text),
            }

    def read(self, worker: Worker) -> bool:
        """Handle what a worker has sent; False when its channel is closed."""
        received, is_open = worker.control.read()
        for fields in received:
            message = messages.decode_worker(fields)
            if message is not None:
                self._on_message[type(message)](worker, message)
        return is_open

    def read_signals(self, worker: Worker, flags: int = 0) -> bool:
        """Handle the signals that a rank forwards, except for those that it got from here; False when it has ended."""
        numbers = worker.signals.recv(64, flags)
        for number in numbers:
            if number == signal.SIGQUIT and worker.dumps:
                worker.dumps -= 1
            elif number in SIGNALS:
                self._decider.take(events.Signalled(number, worker.rank))
        return bool(numbers)

    def on_exit(self, worker: Worker, code: int) -> None:
        """Handle the end of a worker's process, after its last messages."""
        self.read(worker)
        is_unexplained = code == -signal.SIGKILL and not self._decider.state.rank(worker.rank).was_killed
        seen = worker.exit_seen(code, self._memory.verdict() if is_unexplained else None)
        self._decider.take(events.RankExited(worker.rank, code, seen))

    def _on_event(self, worker: Worker, message: Any) -> None:
        self._decider.take(events.FromRank(worker.rank, message))

    def _on_debugger_quit(self, turns: DebugTurns, worker: Worker, message: messages.DebuggerQuit) -> None:
        turns.on_quit()
        self._on_event(worker, message)

    def _on_errored(self, worker: Worker, errored: messages.Errored) -> None:
        """Note the rank's own failure; if a DataLoader worker was killed because memory ran out, it says so."""
        message = errored.message
        if _LOADER_KILLED in message and (why := self._memory.verdict()):
            message = f"{message} ({why})"
        failure = Failure(
            rank=worker.rank,
            host=errored.host,
            kind=errored.error,
            message=message,
            step=errored.step,
            phase=worker.page.status.phase,
            traceback=errored.traceback,
            exit_code=errored.exit_code,
            refused=errored.refused,
            limit=errored.limit,
            reason=errored.reason,
            key=errored.key,
            value=errored.value,
            suggestion=errored.suggestion,
            place=errored.place,
        )
        self._decider.take(events.RankErrored(worker.rank, failure))


def _on_progress(output: Output, worker: Worker, message: messages.Progress) -> None:
    worker.step = message.done
    output.progress(worker, message)
