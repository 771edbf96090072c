"""The jobs of a sweep, or a run, as rows: their values, status and metrics."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddpexp.checkpoint.weights import Best
from ddpexp.run import directory
from ddpexp.run.differences import Value
from ddpexp.run.directory import RunDir
from ddpexp.sweep.files import RunFiles, WatchedRun, override_values, version_of
from ddpexp.sweep.folder import IS_JOB, SweepDir
from ddpexp.sweep.job_status import NOT_ENDED, Queue, Status, status_of
from ddpexp.sweep.record import Goal, JobRecord, SweepRecord
from ddpexp.sweep.values import Settings, texts
from ddpexp.system import files
from ddpexp.system.job_schedulers import ScheduledJob, recorded_job
from ddpexp.system.secrets import masked_tree, masker
from ddpexp.system.text import one_line

_MESSAGE_CHARACTERS = 300


@dataclass(frozen=True)
class Row:
    """A job or a run. Texts are as they were typed or written, with secrets masked; they may hold any characters."""

    number: int
    name: str
    path: Path
    overrides: Mapping[str, str]  # by key
    status: Status
    objective: float | None  # the value that it is compared by; nan: it is not a finite number
    metrics: Mapping[str, float]  # the newest value of each
    step: int | None
    seconds: float | None  # wall time, from the newest start to its end, or to now
    job: ScheduledJob | None  # where it was submitted
    message: str | None  # why it failed or ended early, or another note, in one line
    started: float | None  # seconds since 1970, as `ended`
    ended: float | None
    resolved: Mapping[str, Any] = field(default_factory=dict)  # values by key; empty until the run has begun
    changed: Mapping[str, Sequence[Value]] = field(default_factory=dict)  # those that changed on a resume, in order
    best: Best | None = None  # by its trainer.keep_best
    measured: Mapping[str, float] = field(default_factory=dict)  # how it runs: newest values, such as of times/data
    tags: Sequence[str] = ()
    note: str = ""
    values: Mapping[str, str] = field(default_factory=dict)  # as texts, of the keys in which rows may differ

    def plain(self, key: str) -> Any:
        """Return a value as the configuration has it; one that has changed during the run as text."""
        text = self.values.get(key)
        return text if key in self.changed else self.resolved.get(key, text)


def rows_of(path: Path, objective: str | None = None) -> list[Row]:
    """Return the rows of a sweep's directory, or the one row of a run's.

    `objective` is a metric other than the sweep's own.
    """
    return RowReader(path, objective).rows()


def goal_of(path: Path) -> Goal:
    """Return what the newest start of a sweep compares its jobs by."""
    try:
        return _read_record(path).goal
    except ValueError:
        return Goal()


def directories(path: Path, depth: int = 3) -> Iterator[Path]:
    """Yield the sweeps and runs in a folder, itself or below it, in the order of their names.

    Those inside a sweep are its own.
    """
    if SweepDir(path).is_sweep() or directory.is_ours(path):
        yield path
    elif depth:
        try:
            folders = sorted(entry.path for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False))
        except OSError:
            return
        for folder in folders:
            yield from directories(Path(folder), depth - 1)


class RowReader:
    """Reads a directory repeatedly; what has not changed is read once."""

    def __init__(
        self,
        path: Path,
        objective: str | None = None,
        watch: Callable[[Path], WatchedRun] = WatchedRun,
        queue: Queue | None = None,
    ) -> None:
        """Read nothing yet; `watch` returns the files of a run, which may have been read before."""
        self._path = path
        self._metric = objective
        self._watch = watch
        self._version: str | None = None  # of the log that was read
        self._record = SweepRecord()
        self._runs: dict[Path, WatchedRun] = {}
        self._queue = Queue() if queue is None else queue

    def rows(self) -> list[Row]:
        """Return the rows as of now."""
        return with_values(self.rows_alone())

    def rows_alone(self) -> list[Row]:
        """Return the rows as of now, without the values in which they differ."""
        folder, mask = SweepDir(self._path), masker()
        if not folder.is_sweep():
            if not RunDir(self._path).result.is_file() and not directory.is_ours(self._path):
                return [_broken(self._path, "The directory holds no run")]
            name = IS_JOB.fullmatch(self._path.name)
            job = JobRecord(int(name[1]) if name else 0, self._path.name)
            return [self._row(self._path, job, self._metric, mask)]
        version = version_of(folder.record)
        if version != self._version:
            try:
                self._record = _read_record(self._path)
            except ValueError as error:
                return [_broken(self._path, f"{folder.record.name} {error}")]
            self._version = version
        metric = self._metric or self._record.goal.metric
        jobs = {job.name: job for job in self._record.jobs.values() if job.name is not None}
        if metric != self._record.goal.metric:  # the log has values of the sweep's own objective alone
            jobs = {name: replace(job, objective=None) for name, job in jobs.items()}
        jobs |= {name: JobRecord(int(name.partition("_")[0]), name) for name in _unrecorded(self._path, jobs)}
        self._queue.add(job.scheduled for job in jobs.values() if job.scheduled is not None)
        rows = [self._row(self._path / name, job, metric, mask) for name, job in jobs.items()]
        return sorted(rows, key=lambda row: (row.number, row.name))

    def _row(self, path: Path, job: JobRecord, metric: str | None, mask: Callable[[str], str]) -> Row:
        """Combine a job's own files with the sweep's log; where both have a fact, the files count."""
        if path not in self._runs:
            self._runs[path] = self._watch(path)
        run = self._runs[path].files(metric, mask)
        status, message = status_of(path, job, run, self._queue)
        started, ended, seconds = _times(job, run, status)
        objective = run.metrics.get(metric) if metric is not None else None
        return Row(
            number=job.number,
            name=path.name,
            path=path,
            overrides={**override_values(job.overrides or ()), **run.overrides},
            status=status,
            objective=job.objective if objective is None and status not in NOT_ENDED else objective,
            metrics=run.metrics,
            step=run.step,
            seconds=seconds,
            job=job.scheduled or recorded_job(run.result),
            message=None if message is None else _short(message),
            started=started,
            ended=ended,
            resolved=run.values,
            changed=run.changed,
            best=run.best,
            measured=run.measured,
            tags=run.tags,
            note=run.note,
        )


def _times(job: JobRecord, run: RunFiles, status: Status) -> tuple[float | None, float | None, float | None]:
    """Return when a job's newest start began and ended, and the seconds between, or until now where it runs.

    The sweep's log has both moments, unless a command of its own, or a scheduler, has started the job since: then
    its files do.
    """
    started = job.started
    ended = job.ended
    seconds = job.seconds
    if started is None or (ended is not None and run.started is not None and run.started > ended):
        started, ended, seconds = run.started, ended if run.ended is None else run.ended, None
    elif ended is None:
        ended = run.ended
    if ended is not None and started is not None and ended < started:
        ended = None  # of the start before
    if status in NOT_ENDED:
        until = time.time() if ended is None else ended
        return started, None, max(0.0, until - started) if status == "running" and started is not None else None
    if seconds is None and started is not None and ended is not None:
        seconds = ended - started
    return started, ended, seconds


def _broken(path: Path, message: str) -> Row:
    return Row(
        number=0,
        name=path.name,
        path=path,
        overrides={},
        status="broken",
        objective=None,
        metrics={},
        step=None,
        seconds=None,
        job=None,
        message=_short(message),
        started=None,
        ended=None,
    )


def _read_record(path: Path) -> SweepRecord:
    """Read the log of a directory, which anybody may have made; an empty record if there is none.

    Raises:
        ValueError: it is too large.
    """
    folder = SweepDir(path)
    with suppress(OSError):
        size = folder.record.stat().st_size
        if size > files.JSON_BYTES:
            raise ValueError(f"has {size:,} bytes, more than {files.JSON_BYTES:,}")
    return SweepRecord.of(masked_tree(list(folder.events())))


def _unrecorded(path: Path, recorded: Collection[str]) -> list[str]:
    """Return the folders in a sweep's directory that are named as jobs are, and that its log lacks."""
    try:
        entries = [entry for entry in os.scandir(path) if entry.name not in recorded]
        return [entry.name for entry in entries if IS_JOB.fullmatch(entry.name) and entry.is_dir()]
    except OSError:
        return []


def _short(text: str) -> str:
    line = one_line(" ".join(text.split()))
    return line if len(line) <= _MESSAGE_CHARACTERS else f"{line[: _MESSAGE_CHARACTERS - 3]}..."


def with_values(rows: Sequence[Row], named: Sequence[str] = ()) -> list[Row]:
    """Give each row its values of the keys that any of them overrides, that differ between them, and `named` ones."""
    values = texts([Settings(row.overrides, row.resolved, row.changed) for row in rows], named)
    return [replace(row, values=of_row) for row, of_row in zip(rows, values, strict=True)]
