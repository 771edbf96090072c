"""The jobs of a sweep, or a run, as rows: their overrides, status and metrics."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ddpexp.config.keys import MISSING, value_at
from ddpexp.errors import shown
from ddpexp.run import directory
from ddpexp.run.directory import RunDir
from ddpexp.sweep.files import RunFiles, WatchedRun, override_values, version_of
from ddpexp.sweep.folder import IS_JOB, SweepDir
from ddpexp.sweep.job_status import NOT_ENDED, Queue, Status, status_of
from ddpexp.sweep.record import Goal, JobRecord, SweepRecord
from ddpexp.system import files
from ddpexp.system.job_schedulers import ScheduledJob, recorded_job
from ddpexp.system.secrets import masked_tree, masker
from ddpexp.system.text import one_line
from ddpexp.system.yaml_text import load_yaml

_MESSAGE_CHARACTERS = 300


@dataclass(frozen=True)
class Row:
    """A job or a run. Texts are as they were typed or written, with secrets masked; they may hold any characters."""

    number: int
    name: str
    path: Path
    overrides: Mapping[str, str]  # by key
    status: Status
    objective: float | None  # nan: the metric is not a finite number
    metrics: Mapping[str, float]  # the newest value of each
    step: int | None
    seconds: float | None  # wall time, from the newest start to its end, or to now
    job: ScheduledJob | None  # where it was submitted
    message: str | None  # why it failed or ended early, or another note, in one line
    started: float | None  # seconds since 1970, as `ended`
    ended: float | None


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

    def __init__(self, path: Path, objective: str | None = None) -> None:
        """Read nothing yet."""
        self._path = path
        self._metric = objective
        self._version: object = None  # of the log that was read
        self._record = SweepRecord()
        self._runs: dict[Path, WatchedRun] = {}
        self._queue = Queue()

    def rows(self) -> list[Row]:
        """Return the rows as of now."""
        folder, mask = SweepDir(self._path), masker()
        if not folder.is_sweep():
            if not directory.is_ours(self._path) and not RunDir(self._path).result.is_file():
                return [_broken(self._path, "The directory holds no run")]
            name = IS_JOB.fullmatch(self._path.name)
            return [self._row(self._path, JobRecord(int(name[1]) if name else 0, self._path.name), self._metric, mask)]
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
            self._runs[path] = WatchedRun(path)
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


def with_defaults(rows: Sequence[Row], named: Sequence[str] = ()) -> list[Row]:
    """Add to each row, from its configuration, the values of keys that other rows override, and of those `named`."""
    keys = dict.fromkeys([*(key for row in rows for key in row.overrides), *named])
    filled = []
    for row in rows:
        missing = [key for key in keys if key not in row.overrides]
        tree = _configuration(row.path) if missing else {}
        defaults = {key: text for key in missing if (text := _value(tree, key)) is not None}
        filled.append(replace(row, overrides={**row.overrides, **defaults}) if defaults else row)
    return filled


def _configuration(path: Path) -> Any:
    run = RunDir(path)
    try:
        files.check_yaml(run.config)
        return masked_tree(load_yaml(run.config.read_text()))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}


def _value(tree: Any, key: str) -> str | None:
    """Return a value as it is typed; None for a section or a list, or if there is none."""
    value = value_at(tree, key, MISSING)
    return None if value is MISSING or isinstance(value, Mapping | list) else shown(value)
