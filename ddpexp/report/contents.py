"""What a report has: tables, curves, times, differences and pictures of runs, as plain values for its page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ddpexp import __version__
from ddpexp.config.keys import MISSING
from ddpexp.report.axes import axes
from ddpexp.report.drawn import drawn
from ddpexp.report.pictures import Picture, read_pictures, within
from ddpexp.run.directory import RunDir
from ddpexp.run.provenance import COMMIT, GROUPS, PATCH, without_inner
from ddpexp.settings.metrics import MEASURED
from ddpexp.sweep import comparison
from ddpexp.sweep.diff import ComparedRun, RunsDiff, cell
from ddpexp.sweep.grid import Grid
from ddpexp.sweep.job_status import STATUSES
from ddpexp.sweep.record import Goal
from ddpexp.sweep.rows import Row
from ddpexp.sweep.table import (
    DIRECTORY,
    FACTS,
    basis_text,
    best_text,
    count_text,
    jobs_grid,
    means_grid,
    metric_columns,
)
from ddpexp.system import files
from ddpexp.system.text import counted, one_line
from ddpexp.train.step_times import RECORDED_PHASES
from ddpexp.train.verdict import read_sentence

_RUNS = 200  # that have a line and curves
_PICTURED = 12  # runs whose pictures are looked for
_POINTS = 150_000  # of all curves: about 15 bytes each
_PICTURE_BYTES = 1_000_000
_COLUMNS = 60
_KEYS = 100  # of a group of differences
_TEXT = 400  # characters


@dataclass(frozen=True)
class Reported:
    """Runs that are reported, the best first."""

    rows: Sequence[Row]
    goal: Goal
    every: Sequence[Row]  # those that have no room too

    @classmethod
    def of(cls, rows: Sequence[Row], goal: Goal) -> Reported:
        """Choose the runs."""
        ordered = comparison.sorted_rows(rows, goal)
        return cls(ordered[:_RUNS], goal, ordered)


def contents(rows: Sequence[Row], goal: Goal, title: str, command: str) -> dict[str, Any]:
    """Read the runs and return what a page about them has; nothing in a run directory makes it fail."""
    reported = Reported.of(rows, goal)
    records = drawn([RunDir(row.path).metrics for row in reported.rows], _POINTS // max(1, len(reported.rows)))
    compared = RunsDiff([ComparedRun.of(row.path, row) for row in reported.rows])
    pictures = within(
        [read_pictures(RunDir(row.path).tensorboard) for row in reported.rows[:_PICTURED]], _PICTURE_BYTES
    )
    compared_by = goal.metric or next(iter(comparison.metrics_of(rows)), None)
    best = comparison.best_of(rows, goal)
    page = {
        "title": title,
        "made": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "version": __version__,
        "command": command,
        "summary": f"{count_text(rows)}.{best_text(rows, goal)}",
        "notes": list(_notes(reported, records)),
        "runs": [_run(row, of_run) for row, of_run in zip(reported.rows, records, strict=True)],
        "best": next((number for number, row in enumerate(reported.rows) if row is best), None),
        "metrics": _charted(records, compared_by),
        "table": _table(reported),
        "keys": {key: [row.values.get(key, "") for row in reported.rows] for key in _keys(reported)},
        "colour": max(
            _keys(reported),
            key=lambda key: comparison.num_distinguished_pairs(reported.rows, key),
            default="",
        ),
        "seeds": None if (grid := means_grid(rows, goal)) is None else _grid(grid),
        "axes": axes(reported.rows, _keys(reported), _objective(reported, compared_by)),
        "max": goal.mode == "max" if goal.metric is not None else "accuracy" in (compared_by or ""),
        "phases": RECORDED_PHASES,
        "differences": _differences(compared),
        "environment": _environment(compared, reported.rows),
        "pictures": [_of_run(number, of_run) for number, of_run in enumerate(pictures) if of_run],
    }
    plain: dict[str, Any] = _plain(page)
    return plain


def _notes(reported: Reported, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the sentences below the summary."""
    more = len(reported.every) - len(reported.rows)
    left_out = sum(of_run["more"] for of_run in records)
    running = sum(row.status == "running" for row in reported.rows)
    notes = [
        basis_text(reported.every, reported.goal),
        f"still running when this was made: {counted(running, 'run')}" if running else "",
        f"only the first {len(reported.rows)} runs are shown, {more:,} more are not" if more else "",
        f"{left_out:,} metrics are left out" if left_out else "",
    ]
    return [note for note in notes if note]


def _run(row: Row, records: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": row.name,
        "path": files.relative(row.path),
        "status": row.status,
        "meaning": STATUSES[row.status],
        "message": row.message,
        "verdict": read_sentence(RunDir(row.path), row.resolved),
        **records,
    }


def _charted(records: Sequence[Mapping[str, Any]], first: str | None) -> list[str]:
    """Return the metrics in the order of their charts: what is compared, evaluations, training, memory and GPUs."""
    names = dict.fromkeys(name for of_run in records for name in of_run["curves"])

    def order(name: str) -> tuple[bool, int]:
        return name != first, next((i for i, end in enumerate(("/loss", "/accuracy")) if name.endswith(end)), 2)

    trained = [name for name in names if name.startswith("train/")]
    measured = [name for name in names if name.startswith(MEASURED)]
    evaluated = [name for name in names if name not in trained and name not in measured]
    return [*sorted(evaluated, key=order), *sorted(trained, key=order), *measured]


def _keys(reported: Reported) -> list[str]:
    return comparison.varying(reported.every)[:_COLUMNS]


def _objective(reported: Reported, metric: str | None) -> tuple[str, list[float | None]]:
    """Return the name and the value of each run, by which runs are compared."""
    if reported.goal.name is not None:
        return reported.goal.name, [row.objective for row in reported.rows]
    return metric or "", [row.metrics.get(metric or "") for row in reported.rows]


def _table(reported: Reported) -> dict[str, Any]:
    """Return the table of runs, as `ddpexp table` has it, with what its cells are sorted by."""
    metrics = metric_columns(reported.every, reported.goal)
    columns = [*_keys(reported), *metrics[:_COLUMNS], *(name for name in FACTS if name != DIRECTORY)]
    grid = jobs_grid(reported.rows, reported.goal, reported.every, full=True, columns=columns)
    values = [comparison.columns_of(row, reported.goal) for row in reported.rows]
    facts = [{"step": row.step, "time": row.seconds} for row in reported.rows]
    numbers = [
        [{**of_row, **of_facts}.get(name.removeprefix(comparison.LAST)) for name in columns]
        for of_row, of_facts in zip(values, facts, strict=True)
    ]
    return {**_grid(grid), "numbers": numbers, "status": columns.index("status")}


def _grid(grid: Grid) -> dict[str, Any]:
    return {
        "head": grid.header,
        "right": [column.is_right for column in grid.columns],
        "lines": grid.lines,
        "best": grid.best,
    }


def _differences(compared: RunsDiff) -> list[dict[str, Any]]:
    """Return the groups in which runs differ: of each key the values, with the runs that have them."""
    numbers = [number for number, run in enumerate(compared.runs) if run.problem is None]
    found = []
    for group, keys in compared.groups().items():
        of_group = without_inner({key: tuple(values) for key, values in keys.items()})
        lines = []
        for key, values in list(of_group.items())[:_KEYS]:
            runs: dict[str, list[int]] = {}
            for number, value in zip(numbers, values, strict=True):
                runs.setdefault(cell(value), []).append(number)
            lines.append({"key": key, "values": list(runs.items())})
        found.append({"group": group, "keys": lines, "more": len(of_group) - len(lines)})
    unreadable = [[run.problem, [number]] for number, run in enumerate(compared.runs) if run.problem is not None]
    if unreadable:
        found.append({"group": "cannot be read", "keys": [{"key": "", "values": unreadable}], "more": 0})
    return found


def _environment(compared: RunsDiff, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the groups of what all runs were trained with."""
    readable = compared.readable
    found = [{"group": group, "lines": _shared(readable, group)} for group in GROUPS]
    if len(rows) == 1 and rows[0].overrides:
        found.insert(0, {"group": "overrides", "lines": list(rows[0].overrides.items())})
    return [group for group in found if group["lines"]]


def _shared(runs: Sequence[ComparedRun], group: str) -> list[tuple[str, str]]:
    having = [run.groups[group] for run in runs if run.groups[group]]
    if not having:
        return []
    texts = {key: cell(value) for key, value in having[0].items()}
    same = {key: text for key, text in texts.items() if all(cell(of.get(key, MISSING)) == text for of in having)}
    if group == "code" and all(COMMIT in of and PATCH not in of for of in having):
        same[PATCH] = "none"
    return list(same.items())


def _of_run(number: int, pictures: Mapping[str, Sequence[Picture]]) -> dict[str, Any]:
    return {
        "run": number,
        "names": [
            {"name": name, "steps": [picture.step for picture in of_name],
             "addresses": [Address(picture.address) for picture in of_name]}
            for name, of_name in pictures.items()
        ],
    }  # fmt: skip


class Address(str):
    """Hold a picture as an address; masks and limits for text do not apply to it."""

    __slots__ = ()


def _plain(tree: Any) -> Any:
    """Return values that JSON has, with every text in one line, of a bounded length and without control characters."""
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else None
    if isinstance(tree, str) and not isinstance(tree, Address):
        return one_line(tree if len(tree) <= _TEXT else f"{tree[:_TEXT]}...")
    if isinstance(tree, Mapping):
        return {_plain(key): _plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [value if type(value) is int else _plain(value) for value in tree]
    return tree
