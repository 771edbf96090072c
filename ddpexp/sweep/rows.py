"""The jobs of a sweep, or a run, as rows: their overrides, status and metrics."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from ddpexp.run import directory
from ddpexp.run.directory import RunDir
from ddpexp.sweep.files import Files, Watched, number_of, seen, set_by, text_of
from ddpexp.sweep.folder import IS_JOB, SweepDir, latest
from ddpexp.sweep.job_status import Queue, Status, status_of
from ddpexp.system import files
from ddpexp.system.job_schedulers import ScheduledJob, recorded_job
from ddpexp.system.secrets import masked_tree, masker
from ddpexp.system.text import one_line
from ddpexp.system.yaml_text import load_yaml

UNFINISHED = ("interrupted", "killed", "failed")  # can be resumed

_MESSAGE_CHARACTERS = 300


@dataclass(frozen=True)
class Goal:
    """What jobs are compared by."""

    metric: str | None = None
    mode: Literal["min", "max"] = "min"

    def best(self, values: Sequence[float | None]) -> int | None:
        """Return the place of the best value; None where there is none. What is not finite never wins."""
        finite = [(value, place) for place, value in enumerate(values) if value is not None and math.isfinite(value)]
        if self.metric is None or not finite:
            return None
        sign = 1 if self.mode == "min" else -1
        return min(finite, key=lambda pair: (sign * pair[0], pair[1]))[1]


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
    return Reader(path, objective).rows()


def goal_of(path: Path) -> Goal:
    """Return what the newest start of a sweep compares its jobs by."""
    start = _start(path)
    metric = start.get("objective")
    return Goal(metric if isinstance(metric, str) else None, "max" if start.get("mode") == "max" else "min")


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


class Reader:
    """Reads a directory repeatedly; what has not changed is read once."""

    def __init__(self, path: Path, objective: str | None = None) -> None:
        """Read nothing yet."""
        self._path = path
        self._metric = objective
        self._record: tuple[object, list[dict[str, Any]]] = (None, [])
        self._runs: dict[Path, Watched] = {}
        self._queue = Queue()

    def rows(self) -> list[Row]:
        """Return the rows as of now."""
        folder, now = SweepDir(self._path), _Now(self._metric, self._queue, masker())
        if not folder.is_sweep():
            if not directory.is_ours(self._path) and not RunDir(self._path).result.is_file():
                return [_broken(0, self._path, "it is no run directory")]
            named = IS_JOB.fullmatch(self._path.name)
            return [self._row(int(named[1]) if named else 0, self._path.name, self._path, (), {}, now)]
        try:
            events = self._events()
        except ValueError as error:
            return [_broken(0, self._path, f"{folder.record.name} {error}")]
        recorded = next((event.get("objective") for event in reversed(events) if event["event"] == "sweep"), None)
        now = replace(now, metric=self._metric or text_of(recorded))
        other = {} if now.metric == recorded else {"objective": None}  # the record has only the sweep's own
        submitted, newest = latest(events, "submitted"), _newest(events)
        self._queue.add(job for event in submitted.values() if (job := recorded_job(event)) is not None)
        rows = []
        for number, planned in latest(events, "planned").items():
            name = planned.get("name")
            if isinstance(name, str) and _is_plain(name):
                event = {**submitted.get(number, {}), **newest.get(number, {}), **other}
                rows.append(self._row(number, name, self._path / name, _texts(planned.get("overrides")), event, now))
        names = {row.name for row in rows}
        for path in _jobs(self._path, names):  # jobs that the record lacks
            rows.append(self._row(int(path.name.partition("_")[0]), path.name, path, (), {}, now))
        return sorted(rows, key=lambda row: (row.number, row.name))

    def _events(self) -> list[dict[str, Any]]:
        now = seen(SweepDir(self._path).record)
        if now != self._record[0]:
            self._record = (now, _events(self._path))
        return self._record[1]

    def _row(
        self, number: int, name: str, path: Path, overrides: Sequence[str], event: Mapping[str, Any], now: _Now
    ) -> Row:
        if path not in self._runs:
            self._runs[path] = Watched(path)
        return _row_of(number, name, path, overrides, event, self._runs[path].files(now.metric, now.mask), now)


@dataclass(frozen=True)
class _Now:
    """What all rows of one reading share."""

    metric: str | None
    queue: Queue
    mask: Callable[[str], str]


def _row_of(
    number: int, name: str, path: Path, overrides: Sequence[str], event: Mapping[str, Any], files: Files, now: _Now
) -> Row:  # fmt: skip
    """Combine a job's own files with the sweep's record; where both have a fact, the files count."""
    status, message = status_of(path, event, files, now.queue)
    is_ended = status not in ("waiting", "submitted", "running")
    started, ended, seconds = _times(event, files, status, is_ended)
    objective = files.metrics.get(now.metric) if now.metric is not None else None
    if objective is None and is_ended and event.get("objective") is not None:
        objective = number_of(event["objective"])
    return Row(
        number=number,
        name=name,
        path=path,
        overrides={**set_by(overrides), **files.overrides},
        status=status,
        objective=objective,
        metrics=files.metrics,
        step=files.step,
        seconds=seconds,
        job=recorded_job(event) or recorded_job(files.result),
        message=None if message is None else _short(message),
        started=started,
        ended=ended,
    )


def _times(
    event: Mapping[str, Any], files: Files, status: Status, is_ended: bool
) -> tuple[float | None, float | None, float | None]:
    """Return when a job's newest start began and ended, and the seconds between, or until now where it runs.

    The sweep's record knows both moments, unless a command of its own, or a scheduler, has started the job since: then
    its files do.
    """
    started, ended = number_of(event.get("started", False)), number_of(event.get("ended", False))
    if started is None or (ended is not None and files.started is not None and files.started > ended):
        by_record, started, ended = None, files.started, files.ended if files.ended is not None else ended
    else:
        by_record = number_of(event.get("seconds", False)) if ended is not None else None
        ended = ended if ended is not None else files.ended
    if ended is not None and started is not None and ended < started:
        ended = None  # that was the start before
    if not is_ended:
        seconds = (
            max(0.0, (time.time() if ended is None else ended) - started)
            if status == "running" and started is not None
            else None
        )
        return started, None, seconds
    return started, ended, by_record if by_record is not None or ended is None or started is None else ended - started


def _broken(number: int, path: Path, message: str) -> Row:
    return Row(number, path.name, path, {}, "broken", None, {}, None, None, None, _short(message), None, None)


def _events(path: Path) -> list[dict[str, Any]]:
    """Read the record, which anybody may have made.

    Raises:
        ValueError: it is too large.
    """
    folder = SweepDir(path)
    with suppress(OSError):
        size = folder.record.stat().st_size
        if size > files.JSON_BYTES:
            raise ValueError(f"has {size:,} bytes, more than {files.JSON_BYTES:,}")
    events: list[dict[str, Any]] = masked_tree(list(folder.events())) if folder.is_sweep() else []
    return events


def _start(path: Path) -> dict[str, Any]:
    """Return the event of a sweep's newest start; empty where there is none."""
    with suppress(ValueError):
        return next((event for event in reversed(_events(path)) if event["event"] == "sweep"), {})
    return {}


def _newest(events: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return each job's newest status event, with the times of its start and end as `started` and `ended`."""
    newest: dict[int, dict[str, Any]] = {}
    for event in events:
        number, kind = event.get("job"), event["event"]
        if isinstance(number, int) and kind in ("started", "submitted", "ended"):
            before = newest.get(number, {})
            times = {"started": before.get("started", False)} if kind == "ended" else {}
            newest[number] = {**event, **times, **({} if kind == "submitted" else {kind: event.get("time", False)})}
    return newest


def _jobs(path: Path, known_names: Collection[str]) -> list[Path]:
    """Return the folders in a sweep's directory that are named as jobs are, but for those that are known."""
    try:
        unknown = [entry for entry in os.scandir(path) if entry.name not in known_names]
        return sorted(Path(entry.path) for entry in unknown if IS_JOB.fullmatch(entry.name) and entry.is_dir())
    except OSError:
        return []


def _is_plain(name: str) -> bool:
    """Return whether a name stays in its folder."""
    return 0 < len(name) < 256 and not {"/", "\0"} & set(name) and name not in (".", "..")


def _texts(value: Any) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


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
    """Return a value as it is typed; None where there is none, or a whole section."""
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return None
        tree = tree[part]
    if isinstance(tree, Mapping | list):
        return None
    return "null" if tree is None else str(tree).lower() if isinstance(tree, bool) else str(tree)
