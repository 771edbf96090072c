"""Running the jobs of a sweep: in parallel in the machine's slots, or submitted; finished jobs are left as they are."""

from __future__ import annotations

import math
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from ddpexp.checkpoint import weights
from ddpexp.config.build import did_you_mean
from ddpexp.config.parse import parse
from ddpexp.config.plugins import launcher_name
from ddpexp.config.schema import Experiment
from ddpexp.config.sweeps import JobComposer, Swept
from ddpexp.config.validate import check_layout
from ddpexp.errors import EXIT_DONE, EXIT_FAILED, EXIT_REFUSED, DdpexpError, FinishedError, RefusedError, StoppedError
from ddpexp.launch import Job
from ddpexp.launch.launchers.base import Launcher, Submitter
from ddpexp.launch.rendezvous.layout import resolve
from ddpexp.launch.supervise.signals import signals_as_bytes
from ddpexp.launch.workers.client import Server
from ddpexp.run import directory, resume
from ddpexp.run.directory import RunDir
from ddpexp.sweep.early import Curve, curve_of, names_of, why_hopeless
from ddpexp.sweep.files import number_of
from ddpexp.sweep.folder import Record, SweepDir, again_words, job_name, key_of, latest, words_of
from ddpexp.sweep.hydra_sweeper import Ended, is_grid
from ddpexp.sweep.job import Planned, Started, start
from ddpexp.sweep.settings import Settings
from ddpexp.sweep.slots import Slots
from ddpexp.sweep.table import duration, shown
from ddpexp.sweep.view import View
from ddpexp.system import files
from ddpexp.system.job_schedulers import ScheduledJob, recorded_job, states
from ddpexp.system.limits import said_with_limit
from ddpexp.system.terminal import say

_LOOK_SECONDS = 0.5
_MORE_SECONDS = 15.0  # than the jobs' grace, until they are killed
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


@dataclass
class _Running:
    job: Planned
    attempt: int
    slots: list[int]
    process: Started
    since: float = field(default_factory=time.monotonic)
    pruned: str | None = None  # why it was asked to stop


class SweepFailed(DdpexpError):
    """Jobs of a sweep failed: the text lists them."""


class Scheduler:
    """The jobs of a sweep in its directory, and the state of each."""

    def __init__(self, swept: Swept, settings: Settings, folder: SweepDir, view: View, server: Server | None) -> None:
        """Take the sweep, its directory (which this command has locked), and a warm server, if there is one."""
        self.settings, self.folder, self._view = settings, folder, view
        self._options = ["--config-dir", swept.config_dir] if swept.config_dir else []
        self._swept, self._grid = swept, is_grid(swept)
        self._composer = JobComposer(swept)
        self._slots = Slots(settings.slots)
        self._server = self._given = server
        self._loaded: set[str] = set()  # what that has imported beyond what every server does
        self._earlier = list(folder.events())
        # The names are computed again instead of read, because they are paths and the log is not trusted.
        planned = {
            job: words
            for job, event in latest(self._earlier, "planned").items()
            if (words := words_of(event)) is not None
        }
        self._numbers = {_key(words): job for job, words in planned.items()}
        self._names = {job: job_name(job, words) for job, words in planned.items()}
        self._record: Record | None = None
        self._running: dict[int, _Running] = {}
        self._attempts: dict[int, int] = {}
        self._submitted: dict[int, ScheduledJob] = {}
        self._curves: dict[int, Curve] = {}
        self.ended: dict[int, Ended] = {}  # of this start
        self.planned: dict[int, Planned] = {}
        self._stopped_by: int | None = None
        self._warned = False  # that a job does not report the objective
        self._stops = False  # no more jobs are started
        self._kill_at = math.inf  # those that still run then, although they were asked to stop

    @property
    def began(self) -> bool:
        """Return whether this start has recorded anything."""
        return self._record is not None

    def run(self, batch: Sequence[Sequence[str]]) -> list[Ended]:
        """Run the jobs with these overrides, as many at a time as there are slots; return how each ended.

        Raises:
            RefusedError: one of them cannot run; none has been started. StoppedError: a signal ended the sweep.
        """
        jobs = list({job.number: job for job in map(self._plan, batch)}.values())
        if not jobs:
            swept = " ".join(word for word in self._swept.words if key_of(word) in self._keys)
            raise RefusedError(f"the sweep has no jobs: one of {swept} gives no value.")
        submitter = self._submitter(jobs)
        if submitter is not None and submitter.dry_run:
            submitter.submit(
                self._trainings([job for job in jobs if job.submits]), self.folder.path, lambda place, job_id: None
            )
            return [Ended("submitted") for _ in batch]
        there = self._submitted_before(jobs)
        waiting: deque[Planned] = deque()
        for job in jobs:
            known = self.ended.get(job.number) or there.get(job.number) or self._known(job)
            if known is None:
                waiting.append(job)
            else:
                self.ended[job.number] = known
        submitted = [job for job in waiting if job.submits]
        here = deque(job for job in waiting if not job.submits)
        self._prepare(here)  # before anything is written, so that missing data leaves no trace
        self._begin(jobs)
        if submitter is not None and submitted:
            self._submit(submitter, submitted)
        self._run(here)
        if submitter is not None and submitter.wait and self._stopped_by is None:
            self._follow(submitter, jobs)
        if self._stopped_by is not None:
            raise StoppedError(self._stopped_by)
        if not self._grid and (lost := self.lost_objective()) is not None:
            raise SweepFailed(lost)
        return [self.ended.get(self._plan(words).number, Ended("waiting")) for words in batch]

    def lost_objective(self) -> str | None:
        """Warn that none of the successful jobs reports the objective.

        Does nothing if one does, or if no objective is set.
        """
        done = [self.planned[number] for number, ended in self.ended.items() if ended.status == "done"]
        if (
            self.settings.objective is None
            or not done
            or any(self.ended[job.number].objective is not None for job in done)
        ):
            return None
        place = files.typed(self.folder.path)
        return (
            f"{self._no_objective(done[0])} The jobs are done: python -m ddpexp table {place} sweep.objective=... "
            "shows them."
        )

    def forgotten(self) -> list[str]:
        """Return the names of jobs of earlier starts that are not finished, and that this start does not include."""
        ended = {
            job for job, event in latest(self._earlier, "ended").items() if event.get("status") in ("done", "stopped")
        }
        return [name for job, name in self._names.items() if job not in self.planned and job not in ended]

    def _no_objective(self, job: Planned) -> str:
        assert self.settings.objective is not None
        meant = did_you_mean(self.settings.objective, names_of(job.run), "sweep.objective=")
        return f"sweep.objective={self.settings.objective} is no metric that job {job.name} reports.{meant}"

    def words_again(self) -> list[str]:
        """Return the overrides with which to resume this sweep."""
        return ["resume", files.shortest(self.folder.path), *self._options, *again_words(self._swept.words)]

    def close(self) -> None:
        """Close the log, and the server if this object has created it."""
        if self._record is not None:
            self._record.close()
        if self._server is not None and self._server is not self._given:
            self._server.close()

    # ------------------------------------------------------------------------------------------ before anything runs

    def _plan(self, words: Sequence[str]) -> Planned:
        words = [word for word in words if not word.startswith("sweep.")]
        own = tuple(word for word in words if word.lstrip("+~").partition("=")[0].partition("@")[0] in self._keys)
        number = self._numbers.setdefault(_key(own), max(self._numbers.values(), default=-1) + 1)
        if number in self.planned:
            return self.planned[number]
        name = self._names.get(number) or job_name(number, own)
        run = RunDir(self.folder.path / name)
        try:
            composed = self._composer.compose(words, run.path.absolute(), number)
            experiment = parse(composed.values)
            workers, on_gpus = self._needs(experiment)
        except RefusedError as error:
            raise RefusedError(f"{error} (job {name})") from None
        submits = isinstance(experiment.launcher, Submitter) and experiment.launcher.submits
        job = Planned(number, name, own, tuple(words), experiment, composed.text, run, workers, on_gpus, submits)
        self._check_weights_exist(job)
        return job

    def _check_weights_exist(self, job: Planned) -> None:
        source = job.experiment.run.init_from
        if source is not None and not resume.has_checkpoint(job.run):
            try:
                weights.check_usable(Path(source), f"run.init_from={source}")
            except RefusedError as error:
                raise RefusedError(f"{error} (job {job.name})") from None

    @property
    def _keys(self) -> frozenset[str]:
        return frozenset(key.lstrip("+~") for key in self._swept.keys)

    def _needs(self, experiment: Experiment) -> tuple[int | None, bool]:
        """Return how many slots a job takes, None for all, and whether they are GPUs.

        Raises:
            RefusedError: it cannot run in a sweep, or not on this machine.
        """
        launcher, trainer = experiment.launcher, experiment.trainer
        kind = launcher_name(type(launcher))
        if launcher.ranks_started_externally:
            raise RefusedError(
                f"launcher={kind} is incompatible with -m: there every rank is a command of its own, and each would "
                "run the whole sweep. Use launcher=spawn, or launcher=slurm on the login node"
            )
        if kind not in ("spawn", "elastic"):
            return None, False
        if trainer.nodes not in ("auto", 1):
            raise RefusedError(
                f"trainer.nodes={trainer.nodes} with launcher={kind} wants a command on every machine, and a sweep is "
                "one command. Use launcher=slurm for jobs of several machines"
            )
        layout = resolve(trainer.gpus, trainer.device, trainer.backend, trainer.threads)
        self._slots.check_arguments(layout.world_size, layout.device == "cuda")
        check_layout(experiment, layout)
        return layout.world_size, layout.device == "cuda"

    def _begin(self, jobs: Sequence[Planned]) -> None:
        """Record the sweep; from here on the directory belongs to it."""
        if self._record is None:
            asked = {"words": list(self._swept.words), "options": self._options}
            of = f"of {len(jobs)} job{'s' if len(jobs) > 1 else ''}" if self._grid else f"by {self._swept.sweeper}"
            where = "" if all(job.submits for job in jobs) else f" on {self._slots}"
            say(f"sweep {of}{where} in {files.relative(self.folder.path)}")
            with self.folder.refusing():
                self.folder.logs.mkdir(exist_ok=True)
                files.write(self.folder.asked, yaml.safe_dump(asked, allow_unicode=True, width=10**9))
                self._record = Record(self.folder)
            facts = {"slots": self._slots.count, "kind": "gpu" if self._slots.gpus else "cpu"}
            self._record.add(
                "sweep",
                words=list(self._swept.words),
                **facts,
                objective=self.settings.objective,
                mode=self.settings.mode,
            )
        for job in jobs:
            if job.number not in self.planned:
                self.planned[job.number] = job
                self._record.add("planned", job=job.number, name=job.name, overrides=list(job.overrides))

    def _known(self, job: Planned) -> Ended | None:
        """Return how a job ended in an earlier start, if that is final."""
        before = latest(self._earlier, "ended").get(job.number)
        if before is not None and before.get("status") == "stopped" and self.settings.early_stop is not None:
            return Ended("stopped", self._objective(job), str(before.get("message")))
        if not directory.is_ours(job.run.path):
            return None
        asked = resume.Start(job.name, job.text, job.words)
        try:
            resume.inspect(job.run, asked)
        except FinishedError:
            return Ended("done", self._objective(job))
        except RefusedError:
            if job.run.status() != "done":
                return None  # its own command says so
            drift = ", ".join(str(change) for change in resume.changes_of(job.run, asked) if change.kind != "free")
            say(
                f"ddpexp: warning: {job.name} is finished, and its configuration would be another now ({drift}): it "
                "stays as it is."
            )
            return Ended("done", self._objective(job))
        return None

    def _prepare(self, jobs: Sequence[Planned]) -> None:
        """Prepare the data once, not in each job: all would start together, and report the same errors."""
        seen = []
        for job in jobs:
            if job.workers is not None and job.experiment.data not in seen:
                seen.append(job.experiment.data)
                job.training(self._options).prepare()

    # ----------------------------------------------------------------------------------------------------- submitting

    def _submitter(self, jobs: Sequence[Planned]) -> Submitter | None:
        """Return the launcher that submits those jobs that are not run here, if there are any.

        Raises:
            RefusedError: the sweep wants what only a command that watches its jobs can do.
        """
        found = next((job.experiment.launcher for job in jobs if job.submits), None)
        if found is None:
            return None
        assert isinstance(found, Submitter)
        name = launcher_name(type(found))
        settings = self.settings
        for key, default in (("early_stop", None), ("retries", 0), ("on_failure", "continue")):
            value = getattr(settings, key)
            if value != default:
                raise RefusedError(
                    f"sweep.{key}={value} needs a command that watches the jobs, and launcher={name} submits them to "
                    "a scheduler: leave it out, or run the sweep inside an allocation."
                )
        if not self._grid and not found.wait and not found.dry_run:
            raise RefusedError(
                f"launcher={name} only submits, and hydra/sweeper chooses jobs by their results: add "
                "launcher.wait=true."
            )
        return found

    def _submit(self, submitter: Submitter, jobs: Sequence[Planned]) -> None:
        assert self._record is not None
        record = self._record

        def submitted(place: int, job_id: str) -> None:
            job = ScheduledJob(jobs[place].experiment.launcher.job_scheduler, job_id)
            self._submitted[jobs[place].number] = job
            record.add("submitted", job=jobs[place].number, **job.as_record())
            self.ended[jobs[place].number] = Ended("submitted")

        submitter.submit(self._trainings(jobs), self.folder.path, submitted)

    def _trainings(self, jobs: Sequence[Planned]) -> list[tuple[Launcher, Job]]:
        return [(job.experiment.launcher, job.training(self._options)) for job in jobs]

    def _submitted_before(self, jobs: Sequence[Planned]) -> dict[int, Ended]:
        """Return the jobs that an earlier start has submitted and that are still in the queue, or run."""
        earlier = {number: recorded_job(event) for number, event in latest(self._earlier, "submitted").items()}
        requested = {
            job.number: submitted
            for job in jobs
            if job.number not in self.ended and (submitted := earlier.get(job.number)) is not None
        }
        if not requested:
            return {}
        state_of = states(requested.values())
        queued = {number: submitted for number, submitted in requested.items() if state_of[submitted].is_over is False}
        self._submitted |= queued
        return {number: Ended("submitted") for number in queued}

    def _follow(self, submitter: Submitter, jobs: Sequence[Planned]) -> None:
        """Wait for what was submitted."""
        left = [job for job in jobs if job.number in self._submitted and self.ended[job.number].status == "submitted"]

        def ended(place: int, state: str, code: int) -> None:
            job = left[place]
            code = EXIT_DONE if job.run.status() == "done" else code or EXIT_FAILED
            found = self._judge(job, code)
            if job.run.status() == "submitted":
                found = Ended(
                    "failed", None, f"{self._submitted[job.number]} ended as {state} before its command began"
                )
            self._write_end(job, found, code, None)

        submitter.follow([self._submitted[job.number].id for job in left], ended)

    # ------------------------------------------------------------------------------------------------------- running

    def _run(self, waiting: deque[Planned]) -> None:
        if not waiting:
            return
        with selectors.DefaultSelector() as selector, signals_as_bytes() as signals:
            selector.register(signals, selectors.EVENT_READ, "signals")
            while waiting or self._running:
                if not self._stops:
                    self._start_what_fits(waiting, selector)
                if not self._running:
                    return  # what waits is left for another start
                self._stop_hopeless()
                self._kill_late()
                self._view.look()
                if not waiting:
                    self._view.last_begin()
                for key, _ in selector.select(_LOOK_SECONDS):
                    if key.data == "signals":
                        self._hear(signals)
                    elif key.data == "server":
                        self._drain(selector)
                    else:
                        selector.unregister(key.fileobj)
                        self._end(self._running.pop(key.data), waiting)

    def _start_what_fits(self, waiting: deque[Planned], selector: selectors.BaseSelector) -> None:
        """Start every job for which there are slots, in order; a small job may overtake a large one."""
        for job in list(waiting):
            slots = self._slots.take(job.workers, job.on_gpus)
            if slots is None:
                continue
            environ = self._slots.environ(slots, job.on_gpus) if job.workers is not None else {}
            try:
                server = self._warm(selector) if job.forks_here else None
                process = start(job, self._options, server, environ, self.folder.log(job.number))
            except (OSError, RefusedError) as error:  # no more processes, or files
                self._slots.give_back(slots)
                if self._running:
                    return  # there may be room when one of these has ended
                waiting.remove(job)
                why = said_with_limit(error) if isinstance(error, OSError) else str(error)
                text = f"its process could not be started: {why}"
                self._write_end(job, Ended("failed", None, text), EXIT_FAILED, None)
                continue
            waiting.remove(job)
            self.ended.pop(job.number, None)
            attempt = self._attempts[job.number] = self._attempts.get(job.number, 0) + 1
            self._running[job.number] = _Running(job, attempt, slots, process)
            selector.register(process.handle, selectors.EVENT_READ, job.number)
            assert self._record is not None
            self._record.add("started", job=job.number, attempt=attempt, slots=slots, gpus=self._slots.names(slots))

    def _warm(self, selector: selectors.BaseSelector) -> Server:
        """Return the server that forks a server for each job; a new one if it has exited."""
        if self._server is None or self._server.channel.fileno() == -1:
            self._server, self._loaded = Server(), set()
        if more := {name for job in self.planned.values() if job.forks_here for name in job.modules} - self._loaded:
            self._server.load(sorted(more))
            self._loaded |= more
        if self._server.channel not in {key.fileobj for key in selector.get_map().values()}:
            selector.register(self._server.channel, selectors.EVENT_READ, "server")
        return self._server

    def _drain(self, selector: selectors.BaseSelector) -> None:
        """Read the messages of the server; each job has its own connection for its own messages."""
        assert self._server is not None
        channel = self._server.channel
        if self._server.receive() is None:
            selector.unregister(channel)
            self._server.close()

    def _hear(self, signals: socket.socket) -> None:
        for number in signals.recv(64):
            if number in _END_SIGNALS:
                self._stopped_by = self._stopped_by or number
                self._stop()
            for running in self._running.values():
                running.process.send(number)

    def _stop(self) -> None:
        """Start no more jobs; running jobs are asked to save and end."""
        self._stops = True
        grace = max((running.job.experiment.trainer.grace_seconds for running in self._running.values()), default=0.0)
        self._kill_at = min(self._kill_at, time.monotonic() + grace + _MORE_SECONDS)

    def _kill_late(self) -> None:
        """Kill jobs whose commands do not end in time, for example because they are stopped (SIGSTOP)."""
        if time.monotonic() > self._kill_at:
            for running in self._running.values():
                running.process.send(signal.SIGKILL)

    def _stop_hopeless(self) -> None:
        """Ask jobs that are stopped early to save and end."""
        settings = self.settings
        if settings.early_stop is None or settings.objective is None:
            return
        for number in self._running.keys() | self.ended.keys():
            if number in self._running or number not in self._curves:
                self._curves[number] = curve_of(self.planned[number].run.metrics, settings.objective)
        for number, running in self._running.items():
            if running.pruned is None:
                running.pruned = why_hopeless(
                    settings.early_stop,
                    settings.mode,
                    settings.early_stop_after,
                    settings.early_stop_factor,
                    number,
                    self._curves,
                )
                if running.pruned is not None:
                    running.process.send(signal.SIGTERM)

    def _end(self, running: _Running, waiting: deque[Planned]) -> None:
        """Record how a job ended; restart it or stop the sweep, depending on the settings."""
        self._slots.give_back(running.slots)
        job, code = running.job, running.process.wait()
        ended = self._judge(job, code)
        if ended.status == "interrupted" and running.pruned is not None and self._stopped_by is None:
            ended = Ended("stopped", ended.objective, running.pruned)
        self._curves.pop(job.number, None)  # it may have grown since
        if (
            ended.status == "failed"
            and code != EXIT_REFUSED
            and running.attempt <= self.settings.retries
            and not self._stops
        ):
            waiting.append(job)
        self._write_end(job, ended, code, time.monotonic() - running.since)
        if ended.status == "failed" and self.settings.on_failure == "stop" and not self._stops:
            self._stop()
            for other in self._running.values():
                other.process.send(signal.SIGTERM)

    def _write_end(self, job: Planned, ended: Ended, code: int, seconds: float | None) -> None:
        self.ended[job.number] = ended
        assert self._record is not None
        self._record.add(
            "ended", job=job.number, status=ended.status, exit_code=code, objective=ended.objective,
            message=ended.message,
            **({"seconds": round(seconds, 3)} if seconds is not None else {}),
        )  # fmt: skip
        self._view.ended(self._line(job, ended, seconds))
        if (
            ended.status == "done"
            and ended.objective is None
            and self.settings.objective is not None
            and not self._warned
        ):
            self._warned = True
            say(f"ddpexp: warning: {self._no_objective(job)}")

    def _line(self, job: Planned, ended: Ended, seconds: float | None) -> str:
        metric = self.settings.objective
        value = (
            f"  {metric} {shown(metric, ended.objective)}" if metric is not None and ended.objective is not None else ""
        )
        took = f"  {duration(seconds)}" if seconds is not None else ""
        why = f": {ended.message}" if ended.message else ""
        return f"{len(self.ended)}/{len(self.planned)}  {job.name}  {ended.status}{why}{value}{took}"

    def _judge(self, job: Planned, code: int) -> Ended:
        status = job.run.status() if directory.is_ours(job.run.path) else None
        if code == EXIT_DONE or (status == "done" and code != EXIT_REFUSED):  # a signal may come when all is done
            return Ended("done", self._objective(job))
        if status == "interrupted" and code != EXIT_REFUSED:
            return Ended("interrupted", self._objective(job), "it was stopped by a signal, and saved")
        return Ended("failed", self._objective(job), self._why(job, code))

    def _why(self, job: Planned, code: int) -> str:
        """Return in one line why a job failed."""
        if code < 0:
            known = -code in set(signal.Signals)  # most real-time signals have no name
            return f"its command was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
        if code != EXIT_REFUSED or job.submits:  # a start that is refused leaves what an earlier one has written
            with suppress(RefusedError, KeyError):
                found = job.run.read(job.run.error)
                where = f"rank {found['rank']}: " if code != EXIT_REFUSED else ""
                return " ".join(f"{where}{found['kind']}: {found['message']}".split())
        if job.submits:  # it has its log with it
            return f"exit code {code}"
        log = self.folder.log(job.number)
        try:
            lines = log.read_text(errors="replace").splitlines()
        except OSError as error:  # what keeps it from being written ends the job
            return f"exit code {code}, and its log {files.relative(log)} cannot be read: {error.strerror}"
        return next((line.removeprefix("ddpexp: ") for line in reversed(lines) if line), f"exit code {code}")

    def _objective(self, job: Planned) -> float | None:
        """Return the objective as of the last evaluation; of other metrics, the last record.

        NaN if it was not finite.
        """
        name = self.settings.objective
        if name is None:
            return None
        try:
            metrics = job.run.read(job.run.result).get("metrics")
        except RefusedError:
            return None
        if isinstance(metrics, dict) and name in metrics:
            value = number_of(metrics[name])
            return math.nan if value is None else value
        points = curve_of(job.run.metrics, name)
        return points[-1][1] if points else None


def _key(overrides: Sequence[str]) -> str:
    return "\0".join(sorted(map(str, overrides)))
