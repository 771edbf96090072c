"""Handle what the fork server and the workers report: starts, messages, exits; used by the supervisor."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from ddpexp.errors import EXIT_FAILED, Failure
from ddpexp.launch.supervise import messages
from ddpexp.launch.supervise.causes import Worker, cause_of, failure_of, is_mismatch
from ddpexp.launch.supervise.debug_turns import DebugTurns
from ddpexp.launch.supervise.output import Output
from ddpexp.launch.supervise.run_end import RunEnd
from ddpexp.launch.workers.client import check_answer
from ddpexp.system.oom import Memory

_LOADER_KILLED = "killed by signal: Killed"  # torch's message on a DataLoader worker


class Server(Protocol):
    """What starts workers on request and reports their ends."""

    channel: socket.socket
    memory: Memory
    pid: int

    def receive(self) -> dict[str, Any] | None:
        """Return the next answer, or None when the server is gone."""
        ...

    def kill(self, signum: int, spared: int | None = None) -> None:
        """Send a signal to every living worker except the process `spared`."""
        ...

    def lost(self) -> tuple[str, int | None]:
        """Return a text on how it ended, once it is gone, and the signal that killed it."""
        ...

    def destroy(self) -> None:
        """Kill the server, and with it every worker."""
        ...


class WorkerReports:
    """Handles the messages of workers."""

    def __init__(
        self, output: Output | None, end: RunEnd, quit_debugger: Callable[[bool], None], turns: DebugTurns | None = None
    ) -> None:
        """Show progress and warnings on `output`; None where the worker itself does, and has the terminal.

        `quit_debugger` stops the run.
        """
        self._end = end
        self._on_report: dict[type[Any], Callable[[Worker, Any], None]] = {
            messages.TrainingBegan: self._on_training_began,
            messages.Errored: self._on_errored,
            messages.WorkerDone: self._on_worker_done,
            messages.WorkerStopped: self._on_worker_stopped,
            messages.DebuggerQuit: lambda _worker, message: quit_debugger(message.at_once),
        }
        if turns is not None:
            self._on_report[messages.TerminalRequested] = turns.on_request
            self._on_report[messages.TerminalReturned] = turns.on_return
        if output is not None:
            self._on_report[messages.Progress] = partial(_on_progress, output)
            self._on_report[messages.Warned] = lambda worker, message: output.warned(worker.rank, message.text)

    def read(self, worker: Worker) -> bool:
        """Handle what a worker has sent; False when its channel is closed."""
        received, is_open = worker.control.read()
        for fields in received:
            message = messages.decode_worker(fields)
            if message is not None:
                self._on_report[type(message)](worker, message)
        return is_open

    def _on_training_began(self, worker: Worker, message: messages.TrainingBegan) -> None:
        self._end.began, worker.trains = message.step, True

    def _on_errored(self, worker: Worker, message: messages.Errored) -> None:
        worker.failure = Failure(
            rank=worker.rank,
            host=message.host,
            kind=message.error,
            message=message.message,
            step=message.step,
            phase=worker.page.status.phase,
            traceback=message.traceback,
            exit_code=message.exit_code,
            limit=message.limit,
            reason=message.reason,
            key=message.key,
            value=message.value,
            suggestion=message.suggestion,
            place=message.place,
        )
        worker.failed_at = time.monotonic()
        self._end.fail(worker.failed_at)

    def _on_worker_done(self, worker: Worker, _message: messages.WorkerDone) -> None:
        worker.done = True

    def _on_worker_stopped(self, worker: Worker, message: messages.WorkerStopped) -> None:
        worker.stopped, worker.step = self._end.stop is not None, message.step


def _on_progress(output: Output, worker: Worker, message: messages.Progress) -> None:
    worker.step = message.done
    output.progress(worker, message)


def explain_loader(worker: Worker, memory: Memory) -> None:
    """Add to the failure of a worker whose DataLoader worker was killed that memory ran out, if it did."""
    failure = worker.failure
    if failure is not None and _LOADER_KILLED in failure.message and (why := memory.verdict()):
        worker.failure = replace(failure, message=f"{failure.message} ({why})")


class WorkerEvents:
    """Keeps the records of this command's workers up to date."""

    def __init__(
        self, server: Server, workers: Sequence[Worker], end: RunEnd, reports: WorkerReports, dump: Callable[[], None]
    ) -> None:
        """`dump` makes all ranks of this command dump their stacks."""
        self._server = server
        self._workers = workers
        self._end = end
        self._reports, self._dump = reports, dump

    def dispatch(self) -> bool:
        """Handle one answer of the fork server; False when it is gone, and every worker with it."""
        answer = self._server.receive()
        if answer is None:
            self._on_server_lost()
            return False
        check_answer(answer)
        if answer["kind"] == "started":
            self._worker_of(answer["rank"]).pid = answer["pid"]
        elif answer["kind"] == "failed":  # the server could not fork
            worker = self._worker_of(answer["rank"])
            worker.code, worker.failed_at = EXIT_FAILED, time.monotonic()
            worker.failure = replace(failure_of(worker, answer["error"], answer["message"]), traceback=None)
            self._end.fail(worker.failed_at)
        elif answer["kind"] == "exit":
            worker = next(worker for worker in self._workers if worker.pid == answer["pid"])
            self.on_exit(worker, answer["code"])
        return True

    def _worker_of(self, rank: int) -> Worker:
        return next(worker for worker in self._workers if worker.rank == rank)

    def _on_server_lost(self) -> None:
        for worker in self._workers:
            if worker.code is None:
                worker.code = -signal.SIGKILL
                if worker.failure is None and not worker.ended:
                    text, signum = self._server.lost()
                    worker.failure = replace(failure_of(worker, "ServerLost", text, signum), traceback=None)

    def on_exit(self, worker: Worker, code: int) -> None:
        """Handle the end of a worker's process."""
        if worker.code is not None:
            return  # it was noticed before the server reported it
        worker.code = code
        if worker.code == -signal.SIGKILL and not worker.ended:
            worker.killed_for = self._server.memory.verdict()
        self.on_worker_message(worker)  # its last messages
        explain_loader(worker, self._server.memory)
        if not worker.well:
            worker.failed_at = worker.failed_at or time.monotonic()
            self._end.fail(worker.failed_at)
            if is_mismatch(cause_of(worker)):
                self._dump()  # the stacks of the other ranks show which one is wrong

    def on_worker_message(self, worker: Worker) -> bool:
        """Handle what a worker has sent; False when its channel is closed."""
        return self._reports.read(worker)
