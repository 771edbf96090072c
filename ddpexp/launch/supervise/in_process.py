"""Run a job's only worker in this process, and answer it as a supervisor would; without a watchdog.

The worker is the main thread. A second thread handles the signals that the process receives, and names the step at
which the worker saves or stops. Errors, exit codes and messages are those of a worker that another process supervises.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import os
import platform
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from ddpexp.errors import StoppedError
from ddpexp.launch import Interrupted, Job, Layout, Participants, WorkerRequest
from ddpexp.launch.rendezvous.layout import resolve
from ddpexp.launch.supervise import events
from ddpexp.launch.supervise.assignment import RankAssignment
from ddpexp.launch.supervise.coordinator import worker_environment
from ddpexp.launch.supervise.decider import Decider
from ddpexp.launch.supervise.inbox import Inbox
from ddpexp.launch.supervise.reports import Reports
from ddpexp.launch.supervise.state import Rank, State
from ddpexp.launch.supervise.verdict import exit_code_of
from ddpexp.launch.supervise.worker import Worker
from ddpexp.launch.workers import cleanup
from ddpexp.launch.workers.control import Control
from ddpexp.launch.workers.lines import Lines
from ddpexp.launch.workers.page import Page
from ddpexp.launch.workers.rank_log import Log
from ddpexp.system.hardware import visible_devices
from ddpexp.system.limits import check_open_files
from ddpexp.system.network import LOOPBACK
from ddpexp.system.oom import Memory
from ddpexp.system.streams import MaskedText
from ddpexp.system.terminal import print_message

_NOTICE = "launcher=inline: the worker is this process; nothing watches it, so a hang does not end the run"
_POLL_SECONDS = 0.1


def run(job: Job, request: WorkerRequest) -> int:
    """Run the job's worker here and return the exit code of the run.

    Raises:
        RefusedError, WorkerError, StoppedError: like `Launcher.launch`.
    """
    layout = resolve(request.gpus, request.device, request.backend, request.threads)
    job.check([layout])
    check_open_files(1, 1)
    work = job.lifecycle.begin(layout, Participants([platform.node()]))
    began, on_gpus = time.time(), layout.device == "cuda"
    ours, theirs = socket.socketpair()
    signals, to_signals = socket.socketpair()
    to_signals.setblocking(False)  # a signal handler writes to it
    page, descriptor = Page.make()
    worker = Worker(0, Lines(ours), Log(work.logs, 0), page, signals, pid=os.getpid())
    control = Control(theirs, Page(descriptor), to_signals.fileno(), leads=True, in_process=True)
    os.close(descriptor)
    supervisor = _Supervisor(job, worker, request.grace_seconds, work.requests)
    try:
        with _as_worker(layout, worker.log):
            print(_NOTICE)
            supervisor.start()
            try:
                module, function = work.entry.split(":")
                code = getattr(importlib.import_module(module), function)(*work.arguments, control=control)
            finally:
                signal.set_wakeup_fd(-1)
                supervisor.finish()
        return supervisor.exit_code(code)
    except BaseException:
        cleanup.clear(began, of_gpus=on_gpus)
        raise
    finally:
        worker.log.close()
        for channel in (ours, theirs, signals, to_signals):
            channel.close()


class _Supervisor:
    """Answers the worker's requests and signals, in a thread."""

    def __init__(self, job: Job, worker: Worker, grace_seconds: float, requests: Path | None) -> None:
        """Take over the supervisor's ends of the worker's channels."""
        self._thread = threading.Thread(target=self._run, name="ddpexp-supervisor", daemon=True)
        self._job = job
        self._worker = worker
        self._decider = Decider(
            State((Rank(0),), grace_seconds=grace_seconds),
            [worker],
            send=lambda _message: None,
            send_signal=self._send_signal,
            dismiss=self._dismiss,
            kill_workers=self._dismiss,
            kill_server=self._exit,
            show_last_output=lambda: worker.log_failure(self._decider.state.rank(0).failure),
        )
        self._inbox = Inbox(self._decider, requests)
        self._reports = Reports(self._decider, Memory(), self._inbox)
        self._finished = False

    def start(self) -> None:
        """Handle what arrives until the worker has ended."""
        self._thread.start()

    def _run(self) -> None:
        while not self._finished:
            select.select([self._worker.control.channel, self._worker.signals], [], [], _POLL_SECONDS)
            self._handle()

    def finish(self) -> None:
        """Stop handling: the worker has ended."""
        self._finished = True
        self._thread.join()

    def exit_code(self, code: int) -> int:
        """Return the exit code of the run, once the worker has ended with `code`; raises like `exit_code_of`."""
        self.finish()
        self._handle()  # its last messages
        self._inbox.close()
        self._reports.on_exit(self._worker, code)
        return exit_code_of(self._decider.state, [self._worker])

    def _handle(self) -> None:
        self._decider.look_at_rank_zero()
        with suppress(BlockingIOError):
            self._reports.read_signals(self._worker, socket.MSG_DONTWAIT)
        self._reports.read(self._worker)
        self._decider.take(events.Tick())
        self._inbox.look()

    def _send_signal(self, number: int, spared: int | None = None) -> None:
        if number == signal.SIGQUIT:  # the worker's own handler writes to the terminal alone
            faulthandler.dump_traceback(self._worker.log.fileno())
        _send_signal(number, spared)

    def _dismiss(self) -> None:
        """Make the worker leave without saving."""
        if self._works:
            self._worker.page.stop.leave_at_once()
            _send_signal(signal.SIGTERM)

    @property
    def _works(self) -> bool:
        """Return whether the worker has neither ended nor failed, after which it ends by itself."""
        return not self._finished and self._decider.state.lives(0)

    def _exit(self) -> None:
        """End this process: the worker does not leave."""
        stop = self._decider.state.stop
        if stop is None or not self._works:
            return
        end = StoppedError(stop.signum, self._job.lifecycle.end(Interrupted(self._worker.last_step)))
        print_message(f"ddpexp: {end}")
        os._exit(end.exit_code)


def _send_signal(number: int, spared: int | None = None) -> None:
    if spared != os.getpid():
        os.kill(os.getpid(), number)


@contextmanager
def _as_worker(layout: Layout, log: Log) -> Iterator[None]:
    """Give this process the environment of a worker, and its log a copy of what is printed."""
    devices = visible_devices() if layout.device == "cuda" else ()
    assignment = RankAssignment(0, 1, 0, 1, 0, False, True)
    os.environ.update(worker_environment(layout, assignment, 0, (LOOPBACK, 0), LOOPBACK, devices))
    before = sys.stdout, sys.stderr, sys.argv
    sys.stdout, sys.stderr, sys.argv = _copied(sys.stdout, 1, log), _copied(sys.stderr, 2, log), sys.argv[:1]
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr, sys.argv = before


def _copied(stream: TextIO, descriptor: int, log: Log) -> TextIO:
    stream.flush()
    raw = io.BufferedWriter(_Copied(descriptor, log.fileno()))
    return MaskedText(raw, encoding=stream.encoding, errors="backslashreplace", line_buffering=True)


class _Copied(io.RawIOBase):
    """Writes to a descriptor and to a log, either of which may fail: the reader is gone, the disk is full."""

    def __init__(self, descriptor: int, log: int) -> None:
        self._descriptor, self._log = descriptor, log

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor  # `input` edits lines with readline where this is the terminal

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any, /) -> int:
        for descriptor in (self._descriptor, self._log):
            rest = memoryview(data)
            with suppress(OSError):
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
        return len(memoryview(data))
