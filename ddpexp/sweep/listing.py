"""The runs below a folder as a list: which, in what order, and with which columns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddpexp.config.keys import MISSING
from ddpexp.errors import RefusedError, shown
from ddpexp.sweep import table as tables
from ddpexp.sweep.arguments import meant_name, sweeps_and_runs
from ddpexp.sweep.comparison import metrics_of
from ddpexp.sweep.condition import Condition, names_in, number_of
from ddpexp.sweep.grid import Column, Grid
from ddpexp.sweep.index import RunIndex
from ddpexp.sweep.job_status import Queue
from ddpexp.sweep.rows import Row, RowReader
from ddpexp.sweep.values import Settings

FACTS = ("status", "step", "seconds", "started", "ended", "directory", "tags", "note")
"""Names that can be compared, and sorted by, beside metrics and keys."""
_METRICS = 3  # columns of metrics that nobody has named
_REPORTED = 200  # runs that are read without saying so


def runs_below(folder: Path, report: Callable[[int], None]) -> list[Row]:
    """Return the runs and the jobs of sweeps below a folder, the newest first.

    `report` is called with the number of directories if many have to be read.

    Raises:
        RefusedError: there are none.
    """
    paths, index, queue = sweeps_and_runs(folder), RunIndex(folder), Queue()
    if (new := sum(path not in index for path in paths)) > _REPORTED:
        report(new)
    rows: list[Row] = []
    try:
        for path in paths:
            rows += RowReader(path, watch=index.watch, queue=queue).rows_alone()
    finally:
        index.save(rows)  # of an interrupted command what it has read
    return sorted(
        rows, key=lambda row: (-math.inf if row.started is None else row.started, str(row.path)), reverse=True
    )


def value_of(row: Row, name: str) -> Any:
    """Return a metric, a fact or a value of the configuration; of a group its option. MISSING: the run has none."""
    if name in row.metrics:
        return row.metrics[name]
    if name in FACTS:
        value = str(row.path) if name == "directory" else getattr(row, name)
        return MISSING if value is None else value
    if name in row.resolved:
        return row.resolved[name]
    return Settings(row.overrides, row.resolved, row.changed).text(name) or MISSING


def chosen(rows: Sequence[Row], condition: Condition | None) -> list[Row]:
    """Return the rows that fulfill a condition.

    Raises:
        RefusedError: it compares what none of them has.
    """
    if condition is None:
        return list(rows)
    for name in names_in(condition):
        check_name(rows, name, "--where")
    return [row for row in rows if condition.holds(lambda name, row=row: value_of(row, name))]  # type: ignore[misc]


def by_name(rows: Sequence[Row], typed: str) -> list[Row]:
    """Return the rows sorted by a value, the largest first behind a minus; those without one come last.

    Raises:
        RefusedError: none of them has it.
    """
    name = typed.removeprefix("-")
    check_name(rows, name, "--sort")

    def sort_key(row: Row) -> tuple[bool, float, str]:
        value = value_of(row, name)
        number = number_of(value)
        return (True, 0.0, shown(value)) if number is None else (False, number, "")

    def is_last(row: Row) -> bool:
        value = value_of(row, name)
        return value is MISSING or value is None or math.isnan(number_of(value) or 0.0)

    having = sorted((row for row in rows if not is_last(row)), key=sort_key, reverse=typed.startswith("-"))
    return [*having, *(row for row in rows if is_last(row))]


def check_name(rows: Sequence[Row], name: str, option: str) -> None:
    """Check that a run has a value of this name.

    Raises:
        RefusedError: none has, with the nearest name.
    """
    if not rows or name in FACTS or any(value_of(row, name) is not MISSING for row in rows):
        return
    metrics = sorted({name for row in rows for name in row.metrics}, key=lambda name: (name.startswith("train/"), name))
    typed = [*dict.fromkeys(key for row in rows for key in row.overrides), *metrics]
    known = [*FACTS, *typed, *dict.fromkeys(key for row in rows for key in row.resolved)]
    suggestion = meant_name(name, known)
    if not suggestion.startswith("Did"):  # the list of all keys would be long
        suggestion = f"Available: {', '.join([*FACTS, *typed])}, and every key of the configuration."
    raise RefusedError("is not a metric or key of any of these runs", place=f"{option} {name}", suggestion=suggestion)


def grid(rows: Sequence[Row], every: Sequence[Row], named: Sequence[str]) -> Grid:
    """Lay out rows, with columns for what is `named` too; `every` is all of them, of which these are the first."""
    known = dict.fromkeys(name for row in every for name in row.metrics)
    metrics = list(dict.fromkeys([*(name for name in named if name in known), *metrics_of(every)[:_METRICS]]))
    keys = [name for name in dict.fromkeys(named) if name not in (*FACTS, *known)]
    columns = [
        Column("started", [_moment(row.started) for row in rows], drop=2),
        Column("status", [row.status for row in rows]),
        Column("step", ["" if row.step is None else f"{row.step:,}" for row in rows], is_right=True, drop=3),
    ]
    for number, name in enumerate(metrics):
        cells = [tables.shown(name, row.metrics.get(name)) for row in rows]
        drop = math.inf if name in named or number == 0 else 1 - number / len(metrics)
        columns.append(Column(tables.cell_text(name), cells, is_right=True, drop=drop))
    columns += [Column(key, [_value(row, key) for row in rows], cut="middle") for key in keys]
    return Grid(
        [
            *columns,
            *(
                [Column("tags", [tables.cell_text(" ".join(row.tags)) for row in rows])]
                if any(r.tags for r in rows)
                else []
            ),
            Column("directory", [tables.cell_text(str(row.path)) for row in rows], cut="start"),
            *(
                [Column("note", [tables.cell_text(row.note) for row in rows], drop=1.5)]
                if any(r.note for r in rows)
                else []
            ),
            Column("overrides", [_overrides(row) for row in rows], drop=1, cut="end"),
        ]
    )


def _value(row: Row, key: str) -> str:
    value = value_of(row, key)
    return "" if value is MISSING else tables.cell_text(shown(value))


def _overrides(row: Row) -> str:
    return tables.cell_text(" ".join(f"{key}={value}" for key, value in row.overrides.items()))


def _moment(moment: float | None) -> str:
    is_moment = moment is not None and 0 <= moment < 1e11
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment)) if is_moment else ""
