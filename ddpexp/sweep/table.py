"""Tables of jobs in the terminal, during and after a sweep."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from ddpexp.sweep.comparison import (
    FOLD,
    Group,
    best_of,
    metrics_of,
    num_distinguished_pairs,
    over_seeds,
    repeats,
    sorted_rows,
    varying,
)
from ddpexp.sweep.folder import IS_JOB
from ddpexp.sweep.grid import Column, Fitted, Grid
from ddpexp.sweep.job_status import STATUSES
from ddpexp.sweep.record import Goal, is_finite
from ddpexp.sweep.rows import Row
from ddpexp.system import files
from ddpexp.system.text import is_number, metric_text, one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

DIRECTORY = "directory"
FACTS = ("status", "step", "time", DIRECTORY)
"""Columns that any table of jobs may have."""
_STAY = 2  # keys that tell most jobs apart, which stay longer than other columns
_SHORT = 24  # characters of a name that is shown beside other things
_METRICS = 4  # columns, if no objective is set
_MESSAGES = 10  # of failures, below a table
_LIVE_MESSAGES = 3
_SMALL = 20  # lines of a terminal that has none to spare for them
_AROUND = 4  # lines of a live table: two of its header, an empty one, and the cursor's


def jobs_grid(
    rows: Sequence[Row],
    goal: Goal,
    every: Sequence[Row] | None = None,
    full: bool = False,
    columns: Sequence[str] | None = None,
) -> Grid:
    """Lay out some rows, with the columns that all of them (`every`) need, or with those that are named in `columns`.

    `full` is for files, where paths are not cut.
    """
    every = rows if every is None else every
    best = best_of(every, goal)
    keys, metrics = varying(every), [goal.metric] if goal.metric is not None else metrics_of(every)[:_METRICS]
    names = [*keys, *metrics, *([""] if best else []), *FACTS] if columns is None else columns
    together = len({row.path.parent for row in every}) == 1  # then their own names tell them apart
    repeats = together and all(IS_JOB.fullmatch(row.name) for row in every)
    drops = _drops(every, keys, metrics, repeats) if columns is None else {}

    def cell(row: Row, name: str) -> str:
        if name == "":
            return "best" if row is best else ""
        if name == goal.metric or (name not in row.overrides and name in row.metrics):
            return shown(name, row.objective if name == goal.metric else row.metrics.get(name))
        facts = {
            "status": row.status,
            "step": "" if row.step is None else f"{row.step:,}",
            "time": duration(row.seconds),
        }
        if name in facts:
            return facts[name]
        if name == DIRECTORY and together:
            return cell_text(row.name)
        if name == DIRECTORY:
            return cell_text(str(row.path) if full else files.relative(row.path))
        return cell_text(row.overrides.get(name, ""))

    def is_right(name: str) -> bool:
        if name in ("", *FACTS):
            return name in ("step", "time")
        return name in metrics or all(is_number(row.overrides.get(name, "0")) for row in every)

    def column(name: str) -> Column:
        cells = [cell(row, name) for row in rows]
        if name == DIRECTORY:
            return Column(name, cells, drop=drops.get(name, math.inf), cut="end" if repeats else "start")
        cut: Literal["middle"] | None = "middle" if name in keys else None
        return Column(cell_text(name), cells, is_right(name), drops.get(name, math.inf), cut)

    line = next((number for number, row in enumerate(rows) if row is best), None)
    return Grid([column(name) for name in names], line)


def _drops(every: Sequence[Row], keys: Sequence[str], metrics: Sequence[str], repeats: bool) -> dict[str, int]:
    """Return the columns that a narrow terminal may do without, with their order.

    The time, the step, the directory where its name only repeats values, further metrics, the keys that tell fewest
    jobs apart. The key that tells most apart, the first metric and the status stay.
    """
    weak = list(_weakest_first(every, keys))
    order = [
        "time", "step", *([DIRECTORY] if repeats else []), *reversed(metrics[2:]), *weak[:-_STAY], *metrics[1:2],
        *weak[-_STAY:-1], *([] if repeats else [DIRECTORY]),
    ]  # fmt: skip
    return {name: number for number, name in enumerate(order)}


def _weakest_first(rows: Sequence[Row | Group], keys: Sequence[str]) -> dict[str, int]:
    """Return the keys with their order, those that distinguish fewest rows first."""
    weak = sorted(keys, key=lambda key: (num_distinguished_pairs(rows, key), -keys.index(key)))
    return {key: number for number, key in enumerate(weak)}


def seeds_grid(rows: Sequence[Row], goal: Goal) -> Grid | None:
    """Lay out means over seeds or folds; None where neither vary or nothing is to be compared."""
    groups = over_seeds(rows)
    if not groups or goal.metric is None:
        return None
    groups = goal.best_first(groups, attrgetter("mean"))
    best = 0 if is_finite(groups[0].mean) else None
    repeated = repeats(rows)
    by_fold = FOLD in repeated
    counted = "folds" if by_fold else "seeds"
    if len(repeated) > 1:
        counted = "runs"
    columns = []
    weak = _weakest_first(groups, list(groups[0].overrides))
    for key in groups[0].overrides:
        cells = [cell_text(group.overrides[key]) for group in groups]
        drop = weak[key] if weak[key] < len(weak) - 1 else math.inf
        columns.append(Column(cell_text(key), cells, all(map(is_number, cells)), drop, "middle"))
    columns.append(Column(cell_text(f"mean {goal.metric}"), [shown(goal.metric, group.mean) for group in groups], True))
    columns.append(Column("std", [shown(goal.metric, group.std, "-") for group in groups], True))
    if by_fold:
        columns.append(Column("95 % interval", [_interval(goal.metric, group) for group in groups], True))
    columns.append(Column(counted, [_count(group) for group in groups], True))
    columns.append(Column("", ["best" if number == best else "" for number in range(len(groups))]))
    return Grid(columns, best)


def render(
    rows: Sequence[Row],
    goal: Goal,
    limit: int | None = None,
    messages: int = _MESSAGES,
    columns: Sequence[str] | None = None,
    again: str | None = None,
) -> RenderableType:
    """Return the tables of jobs for the terminal, the best first, at most `limit` rows of them, and some messages.

    `columns` chooses some of them by name. `again` is the command that shows those for which the terminal has no room.
    """
    from rich.console import Group as Lines
    from rich.text import Text

    ordered = sorted_rows(rows, goal)
    first = ordered if limit is None else ordered[:limit]
    parts: list[RenderableType] = [Fitted(jobs_grid(first, goal, rows, columns=columns), again)]
    if len(first) < len(ordered):
        parts.append(Text(f"... and {len(ordered) - len(first):,} more", style="dim"))
    seeds = seeds_grid(rows, goal)
    if seeds is not None:
        parts += ["", Fitted(seeds)]
    return Lines(*parts, "", *summary(rows, goal, messages))


def live(rows: Sequence[Row], goal: Goal, height: int) -> RenderableType:
    """Return what fits into `height` lines.

    What runs, what has ended last, what comes next, and how many there are of all.
    """
    from rich.console import Group as Lines

    below = summary(rows, goal, _LIVE_MESSAGES if height > _SMALL else 0, cut=True)
    room = max(1, height - _AROUND - len(below))
    best = best_of(rows, goal)
    chosen = sorted(rows, key=lambda row: (*_turn(row), row.number))[:room]
    if best is not None and all(row is not best for row in chosen):
        chosen[-1] = best
    return Lines(Fitted(jobs_grid(chosen, goal, rows)), "", *below)


def summary(rows: Sequence[Row], goal: Goal, limit: int = _MESSAGES, cut: bool = False) -> list[RenderableType]:
    """Return what stands below a table: how many of each status, the best, at most `limit` messages.

    `cut` to one line each.
    """
    from rich.text import Text

    messages = sorted(
        (row for row in rows if row.message is not None), key=lambda row: (row.status == "done", -(row.ended or 0.0))
    )
    lines = [
        (f"{_called(row)} {row.status}: {cell_text(row.message or '')}", "dim" if row.status == "done" else "red")
        for row in messages[:limit]
    ]
    if limit and len(messages) > limit:
        lines.append((f"... and {len(messages) - limit:,} more like these", lines[-1][1]))
    counts = Text(f"{count_text(rows)}.{best_text(rows, goal)}", no_wrap=cut, overflow="ellipsis" if cut else "fold")
    return [counts, *(Text(line, style=style, no_wrap=True, overflow="ellipsis") for line, style in lines)]


def shown(name: str, value: float | None, missing: str = "") -> str:
    """Format the value of a metric."""
    if value is None:
        return missing
    if not math.isfinite(value):
        return str(value)
    return metric_text(name, value)


def duration(seconds: float | None) -> str:
    """Format a duration."""
    if seconds is None or not 0 <= seconds < 1e9:
        return ""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _called(row: Row) -> str:
    """Return a short name of a job: its number if its name is long."""
    return cell_text(row.name if len(row.name) <= _SHORT else f"{row.number:04d}")


def count_text(rows: Sequence[Row]) -> str:
    """Return how many jobs have each status."""
    numbers = Counter(row.status for row in rows)
    parts = ", ".join(f"{numbers[status]:,} {status}" for status in sorted(numbers, key=list(STATUSES).index))
    return f"{len(rows):,} {'job' if len(rows) == 1 else 'jobs'}: {parts}" if rows else "no jobs"


def best_text(rows: Sequence[Row], goal: Goal) -> str:
    """Return a sentence about the best job, to be appended."""
    best = best_of(rows, goal)
    if goal.metric is None:
        return ""
    if best is None:
        return f" None has {cell_text(goal.metric)} yet."
    return (
        f" Best ({goal.extreme} {cell_text(goal.metric)}): {shown(goal.metric, best.objective)}, {cell_text(best.name)}"
    )


def _turn(row: Row) -> tuple[int, float]:
    """Return what orders a live table: what runs by its start, what has ended (the last first), what waits."""
    if row.status == "running":
        return 0, row.started or 0.0
    if row.status == "submitted":
        return 2, 0.0
    if row.status == "waiting":
        return 3, 0.0
    return 1, -(row.ended or 0.0)


def _count(group: Group) -> str:
    done = len(group.values)
    return str(done) if done == group.jobs else f"{done} of {group.jobs}"


def _interval(metric: str, group: Group) -> str:
    return " to ".join(shown(metric, end) for end in group.interval) if group.interval is not None else "-"


def cell_text(text: str) -> str:
    """Return a text of a row, whose secrets are masked already, sanitized for a cell."""
    return text if text.isascii() and text.isprintable() else one_line(text)
