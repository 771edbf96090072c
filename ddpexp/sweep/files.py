"""Reading the files of any run, which are not trusted: with bounded size, without secrets, and without exceptions."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from ddpexp.checkpoint.weights import Best, best_step
from ddpexp.config.override_syntax import unescaped
from ddpexp.errors import RefusedError
from ddpexp.run import directory, lock
from ddpexp.run.differences import Value, over_steps
from ddpexp.run.directory import RunDir
from ddpexp.run.history import periods_of
from ddpexp.run.labels import Labels
from ddpexp.run.manifest import moment_of
from ddpexp.settings.metrics import MEASURED
from ddpexp.system import files
from ddpexp.system.files import open_regular, read_json
from ddpexp.system.json_lines import json_lines, parse_line
from ddpexp.system.secrets import masked_tree

_TAIL_BYTES = 1 << 18  # of metrics.jsonl, which nearly always contain the newest values
_LAST_LINES = 50  # that are looked at for one line of training and one of an evaluation
# What is read beside result.json and labels.json.
_OTHERS = (
    "error.json", "metrics.jsonl", "overrides.yaml", "config.yaml", "manifest.json", "checkpoints", lock.NAME,
)  # fmt: skip
HOW_IT_RUNS = ("run.", "hydra.", "sweep.")
"""How keys begin that are no columns of a table."""


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run's files."""

    overrides: Mapping[str, str] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)  # how it runs: the newest values of `MEASURED`
    step: int | None = None
    started: float | None = None
    ended: float | None = None
    failure: str | None = None
    problem: str | None = None  # why they cannot be read
    is_there: bool = False  # a run has been started
    values: Mapping[str, Any] = field(default_factory=dict)  # resolved, by key
    changed: Mapping[str, Sequence[Value]] = field(default_factory=dict)  # values over its steps, of keys that changed
    best: Best | None = None  # by its trainer.keep_best
    tags: Sequence[str] = ()
    note: str = ""

    @classmethod
    def of(cls, run: RunDir, metric: str | None, mask: Callable[[str], str]) -> RunFiles:
        """Read all files; `metric` is searched for however old its newest value is."""
        problems: list[str] = []
        result, manifest = _object(run.result, problems), _object(run.manifest, problems)
        failure = _failure(_object(run.error, [])) if result.get("status") == "failed" else None
        try:
            recorded, step = _newest_values(run.metrics, metric)
        except (OSError, ValueError) as error:
            recorded, step = {}, None
            if not isinstance(error, FileNotFoundError):
                problems.append(f"metrics.jsonl cannot be read: {_reason(error)}")
        measured = {name: value for name, value in recorded.items() if name.startswith(MEASURED)}
        metrics = {name: value for name, value in recorded.items() if name not in measured}
        last = result.get("metrics")
        if isinstance(last, Mapping):
            metrics |= {name: value for name in last if (value := number_of(last[name])) is not None}
        done_step = count_of(result.get("step"))
        values, changed = _values(run, manifest, mask)
        labels = Labels.of(masked_tree(_object(run.labels, []), mask))
        ended = number_of(result.get("ended_at", False))
        return cls(
            overrides=override_values(masked_tree(run.read_overrides(), mask)),
            result=masked_tree(result, mask),
            metrics=masked_tree(metrics, mask),
            measured=masked_tree(measured, mask),
            step=step if done_step is None else done_step,
            started=moment_of(manifest.get("started")),
            ended=ended,
            failure=None if failure is None else mask(failure),
            problem=problems[0] if problems else None,
            is_there=directory.is_ours(run.path),
            values=values,
            changed=changed,
            best=_best(run, result) if values.get("trainer.keep_best") is not None else None,
            tags=labels.tags(values.get("run.tags")),
            note=labels.note,
        )


class WatchedRun:
    """The files of a run, which are read again when they have changed."""

    def __init__(self, path: Path, version: Sequence[str | None] = (), files: RunFiles | None = None) -> None:
        """Read nothing yet; `files` is what they held at a version."""
        self._run = RunDir(path)
        self._version = tuple(version)
        self._files = RunFiles() if files is None else files

    @property
    def version(self) -> Sequence[str | None]:
        """What tells when the files must be read again."""
        return self._version

    @property
    def newest(self) -> RunFiles:
        """What was read last."""
        return self._files

    def files(self, metric: str | None, mask: Callable[[str], str]) -> RunFiles:
        """Return their current contents; `metric` and `mask` as for `RunFiles.of`."""
        folder = str(self._run.path)
        if version_of(folder) is None:
            return RunFiles()
        first = (metric, version_of(f"{folder}/result.json"), version_of(f"{folder}/labels.json"))
        if first == self._version[:3] and self._files.result.get("status") == "done":
            return self._files  # a start that makes it longer removes the result first
        now = (*first, *(version_of(f"{folder}/{name}") for name in _OTHERS))
        if now != self._version:
            self._files, self._version = RunFiles.of(self._run, metric, mask), now
        return self._files


def curve(metrics: Path, metric: str) -> list[tuple[int, float]]:
    """Return the points of a metric that a metrics.jsonl records: steps and values, without those that are NaN."""
    points = {}
    for record in json_lines(metrics, metric):
        step, value = count_of(record.get("step")), number_of(record.get(metric))
        if step is not None and value is not None and not math.isnan(value):
            points[step] = value  # the last value, where a run was killed and repeated a step
    return sorted(points.items())


def override_values(overrides: Sequence[str]) -> dict[str, str]:
    """Return the values of overrides by their keys."""
    values = {}
    for override in overrides:
        key, equals, value = override.lstrip("+~").partition("=")
        if not key.startswith(HOW_IT_RUNS):
            values[key] = unescaped(value) if equals and not override.startswith("~") else "removed"
    return values


def _values(
    run: RunDir, manifest: Mapping[str, Any], mask: Callable[[str], str]
) -> tuple[dict[str, Any], dict[str, tuple[Value, ...]]]:
    """Return the resolved values of a run by key, and of those that changed on a resume all in their order."""
    try:
        periods = periods_of(run, manifest)
    except (RefusedError, OSError, ValueError, TypeError, RecursionError, yaml.YAMLError):
        return {}, {}
    periods = [replace(period, values=masked_tree(period.values, mask)) for period in periods]
    values = dict(periods[-1].values) if periods else {}
    return values, {key: of_key for key, of_key in over_steps(periods).items() if not key.startswith(HOW_IT_RUNS)}


def _best(run: RunDir, result: Mapping[str, Any]) -> Best | None:
    """Return the best step of a run: as its result has it, and until there is one by its checkpoints."""
    best = result.get("best")
    if isinstance(best, Mapping):
        step, mode, metric = count_of(best.get("step")), best.get("mode"), text_of(best.get("metric"))
        value = number_of(best.get("value"))
        if step is not None and mode in ("min", "max") and metric is not None and value is not None:
            return Best(step, mode, metric, value)
    try:
        return best_step(run.checkpoints)
    except (RefusedError, OSError, ValueError):  # another version has written them
        return None


def _object(path: Path, problems: list[str]) -> dict[str, Any]:
    """Read a JSON object; empty if there is none, with the reason if that is a problem."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {_reason(error)}")
        return {}
    if isinstance(content, dict):
        return content
    problems.append(f"{path.name} holds no object")
    return {}


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def _failure(error: Mapping[str, Any]) -> str | None:
    """Return in one line which rank failed, and why."""
    rank, step = count_of(error.get("rank")), count_of(error.get("step"))
    where = f"rank {rank}" if rank is not None else ""
    where += f" after step {step}" if where and step is not None else ""
    return ": ".join(filter(None, (where, text_of(error.get("kind")), text_of(error.get("message"))))) or None


def _newest_values(path: Path, metric: str | None) -> tuple[dict[str, float], int | None]:
    """Return the newest values of training, of evaluation and of a named metric, and the last step.

    Raises: OSError, ValueError.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read(_TAIL_BYTES)
        quoted = b"" if metric is None else json.dumps(metric).encode()
        if quoted not in tail and size > len(tail):
            file.seek(max(0, size - files.JSON_BYTES))
            tail = file.read(files.JSON_BYTES)
    newest_first = tail.splitlines()[::-1]
    values: dict[str, float] = {}
    step, kinds = None, set()
    for line in newest_first[:_LAST_LINES]:
        record = parse_line(line)
        if step is None:
            step = count_of(record.get("step"))
        recorded = _values_of(record)
        if recorded:
            kinds.add(any(name.startswith("train/") for name in recorded))
        values = {**recorded, **values}
        if len(kinds) == 2:
            break
    if metric is not None and metric not in values:  # older than these lines
        line = next((line for line in newest_first if quoted in line), b"")
        values = {**_values_of(parse_line(line)), **values}
    return values, step


def _values_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a record that have names of metrics."""
    return {name: value for name in record if "/" in name and (value := number_of(record[name])) is not None}


def version_of(path: str | Path) -> str | None:
    """Return a text that changes whenever the file changes; None where there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return f"{status.st_mtime_ns} {status.st_size} {status.st_ino}"


def number_of(value: Any) -> float | None:
    """Return a number; null stands for a non-finite one."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def count_of(value: Any) -> int | None:
    """Return a count."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None


def text_of(value: Any) -> str | None:
    """Return a non-empty string."""
    return value if isinstance(value, str) and value else None
