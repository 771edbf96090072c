"""What is in directories, as rows: one a job of a sweep, or one for a run, with how it was asked for and how far it is."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal

import yaml

from ddpexp import lock, rundir
from ddpexp.printable import one_line
from ddpexp.rundir import RunDir, read_json
from ddpexp.secrets import masked_tree
from ddpexp.sweep.folder import SweepDir, latest

Status = Literal["waiting", "submitted", "running", "done", "stopped", "interrupted", "killed", "failed", "broken"]
STATUSES: dict[str, str] = {
    "waiting": "its turn has not come",
    "submitted": "it waits in Slurm's queue, or is about to begin",
    "running": "a command has its directory and lives",
    "done": "it has reached its last step",
    "stopped": "it was ended early, for it was hopeless",
    "interrupted": "a signal ended it, and all of it is saved",
    "killed": "its command ended without a word, as after SIGKILL or a power cut",
    "failed": "it ended with an error",
    "broken": "its files cannot be read",
}
"""What a row's status means."""

UNFINISHED = ("interrupted", "killed", "failed")  # what can be gone on with

_TAIL_BYTES = 1 << 18  # of metrics.jsonl, where the newest values are nearly always
_LAST_LINES = 50  # that are looked at for one line of training and one of an evaluation
_LINE_BYTES = 1 << 20
_MESSAGE_CHARACTERS = 300
_OURS = ("run.", "hydra.", "sweep.")  # keys of where and how a job runs, not of what it is
_JOB = re.compile(r"(\d{4,9})(?:_.*)?", re.DOTALL)
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Goal:
    """What jobs are compared by."""

    metric: str | None = None
    mode: Literal["min", "max"] = "min"

    def best(self, values: Sequence[float | None]) -> int | None:
        """Return the place of the best value; None where there is none. What is not finite never wins."""
        known = [(value, place) for place, value in enumerate(values) if value is not None and math.isfinite(value)]
        if self.metric is None or not known:
            return None
        sign = 1 if self.mode == "min" else -1
        return min(known, key=lambda one: (sign * one[0], one[1]))[1]


@dataclass(frozen=True)
class Row:
    """A job or a run. Texts are as they were typed or written, with secrets masked; they may hold any characters."""

    number: int
    name: str
    path: Path
    overrides: Mapping[str, str]  # what was typed, by key
    status: Status
    objective: float | None  # nan: the metric is there, and is no finite number
    metrics: Mapping[str, float]  # the newest value of each
    step: int | None
    seconds: float | None
    job_id: str | None  # Slurm's
    message: str | None  # why it failed, or what is to be known of it, in one line
    started: float | None  # seconds since 1970, as `ended`
    ended: float | None


def rows_of(path: Path, objective: str | None = None) -> list[Row]:
    """Return the rows of a sweep's directory, or the one row of a run's; `objective` is a metric other than the sweep's own."""
    return Reader(path, objective).rows()


def goal_of(path: Path) -> Goal:
    """Return what the newest start of a sweep compares its jobs by."""
    start = _start(path)
    metric = start.get("objective")
    return Goal(metric if isinstance(metric, str) else None, "max" if start.get("mode") == "max" else "min")


def words_of(path: Path) -> list[str]:
    """Return what was typed for the newest start of a sweep."""
    return _words(_start(path).get("words"))


def directories(path: Path, depth: int = 3) -> Iterator[Path]:
    """Yield the sweeps and runs in a folder, itself or below it, in the order of their names; those inside a sweep are its own."""
    if SweepDir(path).is_sweep() or rundir.is_ours(path):
        yield path
    elif depth:
        try:
            folders = sorted(entry.path for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False))
        except OSError:
            return
        for folder in folders:
            yield from directories(Path(folder), depth - 1)


def curve(path: Path, metric: str) -> list[tuple[int, float]]:
    """Return all points of a metric that a run has recorded: steps and values."""
    name, points = json.dumps(metric).encode(), {}
    with suppress(OSError, ValueError), _open(RunDir(path).metrics) as file:
        read = 0
        while (line := file.readline(_LINE_BYTES)) and (read := read + len(line)) < rundir.JSON_BYTES:
            record = _record(line) if name in line else {}
            step, value = _whole(record.get("step")), _number(record.get(metric, False))
            if step is not None and value is not None:
                points[step] = value  # the last one, where a run was killed and did a step again
    return sorted(points.items())


class Reader:
    """Reads a directory again and again; what has not changed is read once."""

    def __init__(self, path: Path, objective: str | None = None) -> None:
        """Read nothing yet."""
        self._path = path
        self._asked = objective
        self._record: tuple[object, list[dict[str, Any]]] = (None, [])
        self._known: dict[Path, tuple[object, _Files]] = {}

    def rows(self) -> list[Row]:
        """Return how things are now."""
        folder, queue = SweepDir(self._path), _Queue(self._path)
        if not folder.is_sweep():
            if not rundir.is_ours(self._path) and not RunDir(self._path).result.is_file():
                return [_broken(0, self._path, "it is no run directory")]
            named = _JOB.fullmatch(self._path.name)
            return [self._row(int(named[1]) if named else 0, self._path.name, self._path, (), {}, queue)]
        try:
            events = self._events()
        except ValueError as error:
            return [_broken(0, self._path, f"{folder.record.name} {error}")]
        own = next((event.get("objective") for event in reversed(events) if event["event"] == "sweep"), None)
        metric = self._asked or (own if isinstance(own, str) else None)
        other = {} if metric == own else {"objective": None}  # the record knows the sweep's own alone
        submitted, newest = latest(events, "submitted"), _newest(events)
        rows = []
        for number, planned in latest(events, "planned").items():
            name = planned.get("name")
            if isinstance(name, str) and _is_plain(name):
                event = {**submitted.get(number, {}), **newest.get(number, {}), **other}
                rows.append(self._row(number, name, self._path / name, _words(planned.get("overrides")), event, queue, metric))
        names = {row.name for row in rows}
        for path in _jobs(self._path):  # what the record has lost
            if path.name not in names:
                rows.append(self._row(int(path.name.partition("_")[0]), path.name, path, (), {}, queue, metric))
        return sorted(rows, key=lambda row: (row.number, row.name))

    def _events(self) -> list[dict[str, Any]]:
        seen = _seen(SweepDir(self._path).record)
        if seen != self._record[0]:
            self._record = (seen, _events(self._path))
        return self._record[1]

    def _row(
        self, number: int, name: str, path: Path, words: Sequence[str], event: Mapping[str, Any], queue: _Queue,
        metric: str | None = None,
    ) -> Row:  # fmt: skip
        metric = self._asked or metric
        run = RunDir(path)
        seen = [metric, *(_seen(file) for file in (run.result, run.error, run.metrics, run.overrides, run.manifest))]
        known = self._known.get(path)
        if known is None or known[0] != seen:
            known = (seen, _Files.of(run, metric))
            self._known[path] = known
        return _judged(number, name, path, words, event, known[1], metric, queue)


@dataclass(frozen=True)
class _Files:
    """What a run's files say."""

    overrides: Mapping[str, str]
    result: Mapping[str, Any]
    metrics: Mapping[str, float]
    step: int | None
    started: float | None
    ended: float | None
    failure: str | None
    problem: str | None  # why they cannot be read
    there: bool  # a run has begun

    @classmethod
    def of(cls, run: RunDir, metric: str | None) -> _Files:
        problems: list[str] = []
        result, manifest = _object(run.result, problems), _object(run.manifest, problems)
        failure = _failure(_object(run.error, [])) if result.get("status") == "failed" else None
        try:
            metrics, step = _newest_metrics(run.metrics, metric)
        except (OSError, ValueError) as error:
            metrics, step = {}, None
            if not isinstance(error, FileNotFoundError):
                problems.append(f"metrics.jsonl cannot be read: {_reason(error)}")
        last = result.get("metrics")
        if isinstance(last, Mapping):
            metrics = {**metrics, **{str(name): value for name in last if (value := _number(last[name])) is not None}}
        done_step = _whole(result.get("step"))
        ended = None
        with suppress(OSError):
            ended = run.result.stat().st_mtime if result and result.get("status") != "submitted" else None
        return cls(
            overrides=_overrides(masked_tree(run.words())),
            result=result,
            metrics=masked_tree(metrics),
            step=step if done_step is None else done_step,
            started=_moment(manifest.get("started")),
            ended=ended,
            failure=failure,
            problem=problems[0] if problems else None,
            there=bool(manifest) or run.config.is_file(),
        )


def _judged(
    number: int, name: str, path: Path, words: Sequence[str], event: Mapping[str, Any], files: _Files, metric: str | None,
    queue: _Queue,
) -> Row:  # fmt: skip
    """Decide what a job's own files and the sweep's record say together; the files are the truth where both speak."""
    status, message = _status(path, event, files, queue)
    is_ended = status not in ("waiting", "submitted", "running")
    started = _number(event.get("started", False))
    started = files.started if started is None else started
    ended = _number(event.get("ended", False))
    ended = (files.ended if ended is None else ended) if is_ended else None
    seconds = _number(files.result.get("seconds", False)) if is_ended else None
    if seconds is None:
        seconds = _number(event.get("seconds", False)) if is_ended else None
    if status == "running" and started is not None:
        seconds = max(0.0, time.time() - started)
    objective = files.metrics.get(metric) if metric is not None else None
    if objective is None and is_ended and event.get("objective") is not None:
        objective = _number(event["objective"])
    job_id = next((one for one in (event.get("job_id"), files.result.get("job_id")) if isinstance(one, str)), None)
    return Row(
        number=number,
        name=name,
        path=path,
        overrides={**_overrides(words), **files.overrides},
        status=status,
        objective=objective,
        metrics=files.metrics,
        step=files.step,
        seconds=seconds,
        job_id=job_id,
        message=None if message is None else _short(message),
        started=started,
        ended=ended,
    )


def _status(path: Path, event: Mapping[str, Any], files: _Files, queue: _Queue) -> tuple[Status, str | None]:
    told, kind = files.result.get("status"), event.get("event")
    if told == "done":
        return "done", None
    lives, where = _lives(path, queue)
    if lives is not False:
        return "running", None if lives else f"whether {where} still lives cannot be told from here"
    if kind == "started" and _lives(path.parent, queue)[0] is not False:
        return "running", None  # its command has not got to the directory yet, or has just left it
    if files.problem is not None:
        return "broken", files.problem
    if told == "interrupted":
        return ("stopped", _text(event.get("message"))) if event.get("status") == "stopped" else ("interrupted", None)
    if told == "failed":
        return "failed", files.failure or _text(event.get("message"))
    if told == "submitted" or (told is None and kind == "submitted"):
        return _queued(event.get("job_id") or files.result.get("job_id"), queue)
    if told is not None:
        return "broken", f"result.json says status {told!s}, which no run writes"
    if kind == "ended":
        status = event.get("status")
        if status in STATUSES:
            return status, _text(event.get("message"))
        return "broken", f"sweep.jsonl says status {status!s}, which no sweep writes"
    if kind == "started" or files.there or rundir.is_ours(path):
        return "killed", None
    return "waiting", None


def _queued(job_id: Any, queue: _Queue) -> tuple[Status, str | None]:
    if isinstance(job_id, str) and queue.has(job_id) is False:
        return "killed", f"Slurm job {job_id} is not in the queue any more, and has left no word"
    return "submitted", None


class _Queue:
    """Slurm's queue, asked once, if at all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._asked = False
        self._states: Mapping[str, str] | None = None

    def has(self, job_id: str) -> bool | None:
        """Tell whether a job is there; None: Slurm is not here, or does not answer."""
        if not self._asked:
            from ddpexp.launch.slurm import queue  # an import that only what was submitted needs

            self._asked = True
            with suppress(OSError):
                self._states = queue(self._path.stat().st_uid)
        return None if self._states is None else job_id in self._states


def _lives(path: Path, queue: _Queue) -> tuple[bool | None, str]:
    """Tell whether the command that has a directory is there, and which one that is; None: it cannot be told from here."""
    owner = lock.read(path / lock.NAME)
    if owner is None:
        return False, ""
    if owner.host != rundir.host() and owner.slurm_job is not None:
        return queue.has(owner.slurm_job), str(owner)
    return owner.lives(), str(owner)


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
        if size > rundir.JSON_BYTES:
            raise ValueError(f"has {size:,} bytes, more than {rundir.JSON_BYTES:,}")
    events: list[dict[str, Any]] = masked_tree(list(folder.events())) if folder.is_sweep() else []
    return events


def _start(path: Path) -> dict[str, Any]:
    """Return the event of a sweep's newest start; empty where there is none."""
    with suppress(ValueError):
        return next((event for event in reversed(_events(path)) if event["event"] == "sweep"), {})
    return {}


def _newest(events: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return each job's newest event of what became of it, with the times of its start and its end as `started` and `ended`."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        number, kind = event.get("job"), event["event"]
        if isinstance(number, int) and kind in ("started", "submitted", "ended"):
            before = found.get(number, {})
            times = {"started": before.get("started", False)} if kind == "ended" else {}
            found[number] = {**event, **times, **({} if kind == "submitted" else {kind: event.get("time", False)})}
    return found


def _jobs(path: Path) -> list[Path]:
    """Return the folders in a sweep's directory that are named as jobs are."""
    try:
        return sorted(Path(entry.path) for entry in os.scandir(path) if _JOB.fullmatch(entry.name) and entry.is_dir())
    except OSError:
        return []


def _is_plain(name: str) -> bool:
    """Tell whether a name stays in its folder."""
    return 0 < len(name) < 256 and not {"/", "\0"} & set(name) and name not in (".", "..")


def _words(words: Any) -> list[str]:
    return [word for word in words if isinstance(word, str)] if isinstance(words, list) else []


def _overrides(words: Sequence[str]) -> dict[str, str]:
    """Return what words set, by their keys."""
    found = {}
    for word in words:
        key, equals, value = word.lstrip("+~").partition("=")
        if not key.startswith(_OURS):
            found[key] = value if equals and not word.startswith("~") else "removed"
    return found


def _object(path: Path, problems: list[str]) -> dict[str, Any]:
    """Read a JSON object; empty where there is none, with the reason where that is a problem."""
    try:
        found = masked_tree(read_json(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {_reason(error)}")
        return {}
    if isinstance(found, dict):
        return found
    problems.append(f"{path.name} holds no object")
    return {}


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _failure(error: Mapping[str, Any]) -> str | None:
    """Say in one line which rank failed, and why."""
    rank, step = _whole(error.get("rank")), _whole(error.get("step"))
    place = f"rank {rank}" if rank is not None else ""
    place += f" at step {step}" if place and step is not None else ""
    return ": ".join(filter(None, (place, _text(error.get("kind")), _text(error.get("message"))))) or None


def _newest_metrics(path: Path, metric: str | None) -> tuple[dict[str, float], int | None]:
    """Return the newest values of training, of evaluation and of a named metric, and the last step.

    Raises: OSError, ValueError.
    """
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read(_TAIL_BYTES)
        name = b"" if metric is None else json.dumps(metric).encode()
        if name not in tail and size > len(tail):
            file.seek(max(0, size - rundir.JSON_BYTES))
            tail = file.read(rundir.JSON_BYTES)
    values: dict[str, float] = {}
    step, kinds = None, set()
    for line in reversed(tail.splitlines()[-_LAST_LINES:]):
        record = _record(line)
        if step is None:
            step = _whole(record.get("step"))
        found = _metrics(record)
        if found:
            kinds.add(any(one.startswith("train/") for one in found))
        values = {**found, **values}
        if len(kinds) == 2:
            break
    place = tail.rfind(name) if metric is not None and metric not in values else -1
    if place >= 0:
        end = tail.find(b"\n", place)
        line = tail[tail.rfind(b"\n", 0, place) + 1 : end if end >= 0 else len(tail)]
        values = {**_metrics(_record(line)), **values}
    return values, step


def _metrics(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name in record if "/" in name and (value := _number(record[name])) is not None}


def _record(line: bytes) -> dict[str, Any]:
    """Read a line; one that was cut off holds nothing."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _open(path: Path) -> IO[bytes]:
    """Open a plain file that anybody may have made.

    Raises: OSError.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW))  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError("it is no plain file")


def _seen(path: Path) -> object:
    """Return what changes when a file does."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _number(value: Any) -> float | None:
    """Return a number; null is one that was not finite."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None


def _moment(text: Any) -> float | None:
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _short(text: str) -> str:
    line = one_line(" ".join(text.split()))
    return line if len(line) <= _MESSAGE_CHARACTERS else f"{line[: _MESSAGE_CHARACTERS - 3]}..."


def with_defaults(rows: Sequence[Row]) -> list[Row]:
    """Give each row the values that others were typed and it was not, from its own configuration."""
    keys = dict.fromkeys(key for row in rows for key in row.overrides)
    filled = []
    for row in rows:
        missing = [key for key in keys if key not in row.overrides]
        tree = _configuration(row.path) if missing else {}
        found = {key: text for key in missing if (text := _value(tree, key)) is not None}
        filled.append(replace(row, overrides={**row.overrides, **found}) if found else row)
    return filled


def _configuration(path: Path) -> Any:
    run = RunDir(path)
    try:
        rundir.check_yaml(run.config)
        return masked_tree(yaml.load(run.config.read_text(), Loader=_LOADER))
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
