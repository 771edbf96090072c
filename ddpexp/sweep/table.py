"""Tables of jobs in the terminal, during and after a sweep."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal

from ddpexp.settings.metrics import TEST_SET
from ddpexp.sweep.comparison import (
    FOLD,
    LAST,
    Group,
    Sample,
    best_of,
    columns_of,
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
from ddpexp.system.text import duration, is_number, metric_text, one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

DIRECTORY = "directory"
BEST_STEP = "best step"
FACTS = ("status", "step", "time", DIRECTORY)
LABELS = ("tags", "note")
"""Columns of those who name them."""
"""Columns that any table of jobs may have."""
_STAY = 2  # keys that tell most jobs apart, which stay longer than other columns
_SHORT = 24  # characters of a name that is shown beside other things
_METRICS = 4  # columns, if no objective is set
_BEST = "best "  # begins the name of a column
_DECIMALS = 8  # of a mean and its deviation; smaller numbers are written with an exponent
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
    metrics = metric_columns(every, goal)
    names = [*varying(every), *metrics, *([""] if best else []), *FACTS] if columns is None else columns
    values = {row.path: columns_of(row, goal) for row in every}
    known = {*metrics, *(name for of_row in values.values() for name in of_row)}
    known |= {f"{LAST}{name}" for name in known}
    keys = [name for name in names if name not in ("", *FACTS, *LABELS, *known)]
    together = len({row.path.parent for row in every}) == 1  # then their own names tell them apart
    repeats = together and all(IS_JOB.fullmatch(row.name) for row in every)
    drops = _drops(every, keys, goal, metrics, repeats) if columns is None else {}

    def cell(row: Row, name: str) -> str:
        if name == "":
            return "best" if row is best else ""
        if name == BEST_STEP:
            return "" if row.best is None else f"{row.best.step:,}"
        if name in known:
            return shown(name, values[row.path].get(name.removeprefix(LAST)))
        facts = {
            "status": row.status,
            "step": "" if row.step is None else f"{row.step:,}",
            "time": duration(row.seconds),
            "tags": cell_text(" ".join(row.tags)),
            "note": cell_text(row.note),
        }
        if name in facts:
            return facts[name]
        if name == DIRECTORY and together:
            return cell_text(row.name)
        if name == DIRECTORY:
            return cell_text(str(row.path) if full else files.relative(row.path))
        return cell_text(row.values.get(name, ""))

    def is_right(name: str) -> bool:
        if name in ("", *FACTS, *LABELS):
            return name in ("step", "time")
        return name in known or all(is_number(row.values.get(name) or "0") for row in every)

    bests = [f"{_BEST}{row.best.metric}" for row in every if row.best is not None]

    def column(name: str) -> Column:
        cells = [cell(row, name) for row in rows]
        head = _beside(name, bests) if name in known else name
        if name == DIRECTORY:
            return Column(name, cells, drop=drops.get(name, math.inf), cut="end" if repeats else "start")
        cut: Literal["middle"] | None = "middle" if name in keys else None
        return Column(cell_text(head), cells, is_right(name), drops.get(name, math.inf), cut)

    line = next((number for number, row in enumerate(rows) if row is best), None)
    return Grid([column(name) for name in names], line)


def metric_columns(rows: Sequence[Row], goal: Goal, every: bool = False) -> list[str]:
    """Return the columns of metrics: the objective, or else some, and beside the first the best value and its step.

    `every` metric, those of training too.
    """
    chosen = metrics_of(rows)[:_METRICS] if goal.metric is None else []
    if every:
        chosen = list(dict.fromkeys(name for row in rows for name in row.metrics))
    first, *others = dict.fromkeys([*([goal.metric] if goal.metric is not None else []), *chosen]) or [""]
    best = dict.fromkeys(f"best {row.best.metric}" for row in rows if row.best is not None)
    first, *others = [_beside(name, best) for name in (first, *others)]
    return [*([first] if first else []), *best, *([BEST_STEP] if best else []), *others]


def _beside(name: str, columns: Collection[str]) -> str:
    """Return the name of a metric's value: the last one of an evaluation, where columns have a value of best weights.

    The set `test` is evaluated once, by the weights that the run says.
    """
    has_best = any(column.startswith(_BEST) for column in columns)
    is_plain = name.startswith(("train/", f"{TEST_SET}/", _BEST, LAST)) or "/" not in name
    return name if is_plain or not has_best else f"{LAST}{name}"


def all_columns(rows: Sequence[Row], goal: Goal) -> list[str]:
    """Return the names of every column: all keys that differ, and all metrics."""
    return [*varying(rows, every=True), *metric_columns(rows, goal, every=True), "", *FACTS]


def _drops(
    every: Sequence[Row], keys: Sequence[str], goal: Goal, metrics: Sequence[str], repeats: bool
) -> dict[str, int]:
    """Return the columns that a narrow terminal may do without, with their order.

    The time, the step, the directory where its name only repeats values, further metrics, the keys that tell fewest
    jobs apart. The key that tells most apart, the metric that is compared and the status stay.
    """
    weak = list(_weakest_first(every, keys))
    compared = goal.name or next(iter(metrics), "")
    further = [name for name in metrics if name not in (compared, f"{LAST}{compared}")]
    order = [
        "time", "step", *([DIRECTORY] if repeats else []), *reversed(further[1:]), *weak[:-_STAY], *further[:1],
        *weak[-_STAY:-1], *([] if repeats else [DIRECTORY]),
    ]  # fmt: skip
    return {name: number for number, name in enumerate(order)}


def _weakest_first(rows: Sequence[Row | Group], keys: Sequence[str]) -> dict[str, int]:
    """Return the keys with their order, those that distinguish fewest rows first."""
    weak = sorted(keys, key=lambda key: (num_distinguished_pairs(rows, key), -keys.index(key)))
    return {key: number for number, key in enumerate(weak)}


def seeds_grid(rows: Sequence[Row], goal: Goal) -> Grid | None:
    """Lay out means over seeds or folds; None where neither varies, or nothing is recorded.

    Without an objective they are those of the first metric.
    """
    groups, name = over_seeds(rows, goal), goal.name or next(iter(metrics_of(rows)), None)
    if not groups or name is None:
        return None
    best = 0 if is_finite(groups[0].sample(goal).mean) else None
    samples = [group.metrics.get(name, Sample(())) for group in groups]
    columns = [
        *_key_columns(groups),
        Column(cell_text(f"mean {name}"), [shown(name, sample.mean) for sample in samples], True),
        Column("std", [shown(name, sample.std, "-") for sample in samples], True),
        Column("95 % interval", [_interval(name, sample) for sample in samples], True, drop=-1),
        _count_column(rows, groups, samples),
        Column("", ["best" if number == best else "" for number in range(len(groups))]),
    ]
    return Grid(columns, best)


def means_grid(rows: Sequence[Row], goal: Goal, metrics: Sequence[str] | None = None) -> Grid | None:
    """Lay out the mean and the deviation of every metric over seeds or folds, for a text; None as in `seeds_grid`.

    Of `metrics` alone, if any is among them.
    """
    groups = over_seeds(rows, goal)
    every = list(dict.fromkeys(name for group in groups for name in group.metrics))
    names = [name for name in every if not name.startswith("train/")] or every
    chosen = [name.removeprefix(LAST) for name in metrics or ()]
    names = [name for name in every if name in chosen] or names
    if not names:
        return None
    samples = {name: [group.metrics.get(name, Sample(())) for group in groups] for name in names}
    first = goal.name if goal.name in samples else names[0]
    columns = [
        *_key_columns(groups),
        *(
            Column(cell_text(_beside(name, every)), [mean_text(name, sample) for sample in samples[name]], True)
            for name in names
        ),
        Column(
            cell_text(f"95 % interval of {_beside(first, every)}"),
            [_interval(first, sample) for sample in samples[first]],
            True,
        ),
        _count_column(rows, groups, samples[first]),
    ]
    return Grid(columns, 0 if is_finite(groups[0].sample(goal).mean) else None)


def _key_columns(groups: Sequence[Group]) -> list[Column]:
    """Return the columns of the keys that tell groups apart."""
    columns = []
    weak = _weakest_first(groups, list(groups[0].values))
    for key in groups[0].values:
        cells = [cell_text(group.values[key]) for group in groups]
        drop = weak[key] if weak[key] < len(weak) - 1 else math.inf
        columns.append(Column(cell_text(key), cells, all(map(is_number, cells)), drop, "middle"))
    return columns


def _count_column(rows: Sequence[Row], groups: Sequence[Group], samples: Sequence[Sample]) -> Column:
    repeated = repeats(rows)
    counted = "folds" if FOLD in repeated else "seeds"
    if len(repeated) > 1:
        counted = "runs"
    numbers = [(len(sample.values), group.jobs) for group, sample in zip(groups, samples, strict=True)]
    return Column(counted, [str(done) if done == jobs else f"{done} of {jobs}" for done, jobs in numbers], True)


def mean_text(name: str, sample: Sample) -> str:
    """Return a mean and its standard deviation, rounded to two digits of the deviation."""
    mean, std = sample.mean, sample.std
    if mean is None or std is None or not math.isfinite(std) or std == 0:
        return shown(name, mean) if not std else f"{shown(name, mean)} ± {shown(name, std)}"
    factor, unit = (100, " %") if shown(name, 1.0).endswith("%") else (1, "")
    decimals = max(0, 1 - int(f"{factor * std:.1e}".partition("e")[2]))  # 0.0999... has the digits of 0.10
    if decimals > _DECIMALS:
        return f"{mean:.4g} ± {std:.2g}"
    return f"{factor * mean:.{decimals}f} ± {factor * std:.{decimals}f}{unit}"


def render(
    rows: Sequence[Row],
    goal: Goal,
    limit: int | None = None,
    messages: int = _MESSAGES,
    columns: Sequence[str] | None = None,
    again: str | None = None,
    seeds_only: bool = False,
) -> RenderableType:
    """Return the tables of jobs for the terminal, the best first, at most `limit` rows of them, and some messages.

    `columns` chooses some of them by name. `again` is the command that shows those for which the terminal has no room.
    `seeds_only` leaves out the jobs; the means are then those of the metrics in `columns`.
    """
    from rich.console import Group as Lines
    from rich.text import Text

    ordered = sorted_rows(rows, goal)
    first = ordered if limit is None else ordered[:limit]
    basis = basis_text(rows, goal)
    parts: list[RenderableType] = [Text(basis, style="dim")] if basis else []
    if not seeds_only:
        parts.append(Fitted(jobs_grid(first, goal, rows, columns=columns), again))
    if len(first) < len(ordered) and not seeds_only:
        parts.append(Text(f"... and {len(ordered) - len(first):,} more", style="dim"))
    seeds = seeds_grid(rows, goal) if columns is None or not seeds_only else means_grid(rows, goal, columns)
    if seeds is not None:
        parts += [*([] if seeds_only else [""]), Fitted(seeds)]
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
    step = f" at step {best.best.step:,}" if goal.by_best and best.best is not None else ""
    value = f"{shown(goal.metric, best.objective)}{step}"
    return f" Best ({goal.extreme} {cell_text(goal.metric)}): {value}, {cell_text(best.name)}"


def basis_text(rows: Sequence[Row], goal: Goal) -> str:
    """Return a sentence on which value of each run is compared, where that may not be the last."""
    if goal.metric is None:
        return ""
    metric = cell_text(goal.metric)
    if goal.by_best:
        return f"by the best {metric} of each run (trainer.keep_best)"
    kept = [row.resolved.get("trainer.keep_best") for row in rows if row.resolved]
    other = f"{'max' if goal.mode == 'min' else 'min'}:{goal.metric}"
    if other in kept:
        contradiction = f"trainer.keep_best={cell_text(other)} contradicts sweep.mode={goal.mode}"
        return f"by the last {metric} of each run: {contradiction}"
    return f"by the last {metric} of each run: not all of them keep the best" if any(map(goal.keeps, kept)) else ""


def _turn(row: Row) -> tuple[int, float]:
    """Return what orders a live table: what runs by its start, what has ended (the last first), what waits."""
    if row.status == "running":
        return 0, row.started or 0.0
    if row.status == "submitted":
        return 2, 0.0
    if row.status == "waiting":
        return 3, 0.0
    return 1, -(row.ended or 0.0)


def _interval(metric: str, sample: Sample) -> str:
    return " to ".join(shown(metric, end) for end in sample.interval) if sample.interval is not None else "-"


def cell_text(text: str) -> str:
    """Return a text of a row, whose secrets are masked already, sanitized for a cell."""
    return text if text.isascii() and text.isprintable() else one_line(text)
