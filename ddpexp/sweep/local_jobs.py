"""Run the jobs of a sweep on this machine, as many at a time as there are slots for."""

from __future__ import annotations

import math
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ddpexp.errors import EXIT_FAILED, EXIT_REFUSED, RefusedError
from ddpexp.launch.supervise.signals import signals_as_bytes
from ddpexp.launch.workers.client import Server
from ddpexp.sweep.early import Curve, best_so_far, prune_reason
from ddpexp.sweep.files import curve
from ddpexp.sweep.job import Planned, Started, start
from ddpexp.sweep.job_result import Ended, ResultReader
from ddpexp.sweep.slots import Slots
from ddpexp.sweep.sweep_log import SweepLog
from ddpexp.system.limits import reason_with_limit

_POLL_SECONDS = 0.5
_CHECK_SHARE = 20  # of the time that a job has run passes between two looks for its objective
_KILL_DELAY_SECONDS = 15.0  # from the end of the jobs' own grace period
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


@dataclass
class _Running:
    job: Planned
    attempt: int
    slots: list[int]
    process: Started
    since: float = field(default_factory=time.monotonic)
    pruned: str | None = None  # why it was stopped early


class WarmServer:
    """The fork server that forks a server for each job; a new one is started if it has exited."""

    def __init__(self, server: Server | None) -> None:
        """Take the one that was started early, if there is one, which the caller closes."""
        self._server = self._given = server
        self._loaded: set[str] = set()  # what it has imported beyond what every server imports

    def get(self, selector: selectors.BaseSelector, jobs: Iterable[Planned]) -> Server:
        """Return the server, with the modules of these jobs imported; the selector watches it as `server`."""
        if self._server is None or self._server.channel.fileno() == -1:
            self._server, self._loaded = Server(), set()
        if more := {name for job in jobs if job.experiment.launcher.forks_here for name in job.modules} - self._loaded:
            self._server.load(sorted(more))
            self._loaded |= more
        if self._server.channel not in {key.fileobj for key in selector.get_map().values()}:
            selector.register(self._server.channel, selectors.EVENT_READ, "server")
        return self._server

    def drain(self, selector: selectors.BaseSelector) -> None:
        """Read its messages; each job has its own connection for its own messages."""
        assert self._server is not None
        channel = self._server.channel
        if self._server.receive() is None:
            selector.unregister(channel)
            self._server.close()

    def close(self) -> None:
        """Close the server if this object has started it."""
        if self._server is not None and self._server is not self._given:
            self._server.close()


class LocalJobs:
    """Starts and watches the processes of jobs; stops them early, restarts them, or kills them where necessary."""

    def __init__(
        self, log: SweepLog, slots: Slots, results: ResultReader, server: WarmServer, options: Sequence[str]
    ) -> None:
        """Take what the jobs share; `options` are those of the sweep's command line that say where configs are."""
        self._log = log
        self._slots = slots
        self._results = results
        self._server = server
        self._options = options
        self._running: dict[int, _Running] = {}
        self._attempts: dict[int, int] = {}
        self._curves: dict[int, Curve] = {}
        self._stopping = False  # no more jobs are started
        self._objective_checked = False
        self._check_at = 0.0  # when the running jobs are looked at for the objective
        self._kill_at = math.inf  # when jobs are killed that still run although they were stopped
        self.stopped_by: int | None = None  # the signal that ended the sweep

    def run(self, waiting: deque[Planned]) -> None:
        """Run the jobs until all have ended; once the sweep is stopped, those that have not begun are left out."""
        if not waiting:
            return
        with selectors.DefaultSelector() as selector, signals_as_bytes() as signals:
            selector.register(signals, selectors.EVENT_READ, "signals")
            while waiting or self._running:
                if not self._stopping:
                    self._start_jobs(waiting, selector)
                if not self._running:
                    return  # what waits is left for another start
                self._prune()
                self._check_objective()
                self._kill_late()
                self._log.view.update()
                if not waiting:
                    self._log.view.prepare_plot()
                for key, _ in selector.select(_POLL_SECONDS):
                    if key.data == "signals":
                        self._handle_signals(signals)
                    elif key.data == "server":
                        self._server.drain(selector)
                    else:
                        selector.unregister(key.fileobj)
                        self._end(self._running.pop(key.data), waiting)

    def _start_jobs(self, waiting: deque[Planned], selector: selectors.BaseSelector) -> None:
        """Start every job for which there are slots, in order; a small job may overtake a large one."""
        for job in list(waiting):
            slots = self._slots.take(job.workers, job.on_gpus)
            if slots is None:
                continue
            environ = self._slots.environ(slots, job.on_gpus) if job.workers is not None else {}
            try:
                is_warm = job.experiment.launcher.forks_here
                server = self._server.get(selector, self._log.planned.values()) if is_warm else None
                process = start(job, self._options, server, environ, self._log.folder.log(job.number))
            except (OSError, RefusedError) as error:  # no more processes, or files
                self._slots.give_back(slots)
                if self._running:
                    return  # there may be room when one of these has ended
                waiting.remove(job)
                reason = reason_with_limit(error) if isinstance(error, OSError) else str(error)
                text = f"its process could not be started: {reason}"
                self._log.end(job, Ended("failed", None, text), EXIT_FAILED, None)
                continue
            waiting.remove(job)
            self._log.ended.pop(job.number, None)
            attempt = self._attempts[job.number] = self._attempts.get(job.number, 0) + 1
            self._running[job.number] = _Running(job, attempt, slots, process)
            selector.register(process.handle, selectors.EVENT_READ, job.number)
            self._log.add("started", job=job.number, attempt=attempt, slots=slots, gpus=self._slots.names(slots))

    def _handle_signals(self, signals: socket.socket) -> None:
        for number in signals.recv(64):
            if number in _END_SIGNALS:
                self.stopped_by = self.stopped_by or number
                self._stop()
            for running in self._running.values():
                running.process.send(number)

    def _stop(self) -> None:
        """Start no more jobs, and kill those that have not ended by themselves after their grace period."""
        self._stopping = True
        grace = max((running.job.experiment.trainer.grace_seconds for running in self._running.values()), default=0.0)
        self._kill_at = min(self._kill_at, time.monotonic() + grace + _KILL_DELAY_SECONDS)

    def _kill_late(self) -> None:
        """Kill jobs whose commands do not end in time, for example because they are stopped (SIGSTOP)."""
        if time.monotonic() > self._kill_at:
            for running in self._running.values():
                running.process.send(signal.SIGKILL)

    def _prune(self) -> None:
        """Send SIGTERM to jobs that early stopping rules out, so that they save and end."""
        settings = self._log.settings
        if settings.early_stop is None or settings.objective is None:
            return
        for number in self._running.keys() | self._log.ended.keys():
            if number in self._running or number not in self._curves:
                job = self._log.planned[number]
                points = curve(job.run.metrics, settings.objective)
                keeps = self._log.goal.keeps(job.experiment.trainer.keep_best)
                self._curves[number] = best_so_far(points, settings.mode) if keeps else points
        for number, running in self._running.items():
            if running.pruned is None:
                running.pruned = prune_reason(
                    settings.early_stop,
                    settings.mode,
                    settings.early_stop_after,
                    settings.early_stop_factor,
                    number,
                    self._curves,
                )
                if running.pruned is not None:
                    running.process.send(signal.SIGTERM)

    def _check_objective(self) -> None:
        """Look whether the jobs report the objective, so that a misspelt one is not found only when they have ended.

        Their files are read ever less often, until one job has evaluated.
        """
        now = time.monotonic()
        if self._objective_checked or now < self._check_at:
            return
        oldest = min(self._running.values(), key=lambda running: running.since)
        self._check_at = now + max(_POLL_SECONDS, (now - oldest.since) / _CHECK_SHARE)
        self._objective_checked = self._log.check_objective(oldest.job)

    def _end(self, running: _Running, waiting: deque[Planned]) -> None:
        """Record how a job ended; restart it or stop the sweep, depending on the settings."""
        self._slots.give_back(running.slots)
        job, code = running.job, running.process.wait()
        ended = self._results.result(job, code)
        if ended.status == "interrupted" and running.pruned is not None and self.stopped_by is None:
            ended = Ended("stopped", ended.objective, running.pruned)
        self._curves.pop(job.number, None)  # it may have grown since
        if (
            ended.status == "failed"
            and not ended.diverged  # it would diverge again
            and code != EXIT_REFUSED
            and running.attempt <= self._log.settings.retries
            and not self._stopping
        ):
            waiting.append(job)
        self._log.end(job, ended, code, time.monotonic() - running.since)
        if ended.status == "failed" and self._log.settings.on_failure == "stop" and not self._stopping:
            self._stop()
            for other in self._running.values():
                other.process.send(signal.SIGTERM)
