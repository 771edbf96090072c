"""The command `ddpexp status`: how far a run or the jobs of a sweep are; it starts nothing."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpexp.cli.verb import Call
from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.run import lock
from ddpexp.run.directory import RunDir
from ddpexp.run.resume_arguments import typed_arguments
from ddpexp.sweep import comparison
from ddpexp.sweep import table as tables
from ddpexp.sweep.arguments import sweeps_and_runs
from ddpexp.sweep.as_json import row_as_dict
from ddpexp.sweep.folder import SweepDir, read_command, restated_overrides
from ddpexp.sweep.grid import Column, Fitted, Grid, limit, show
from ddpexp.sweep.job_result import diverged
from ddpexp.sweep.job_status import STATUSES, UNFINISHED
from ddpexp.sweep.record import Goal
from ddpexp.sweep.rows import Row, goal_of, rows_of
from ddpexp.system import files
from ddpexp.system.job_schedulers import ScheduledJob, states
from ddpexp.system.job_schedulers.base import FORGOTTEN, JobState
from ddpexp.system.terminal import print_json
from ddpexp.system.text import duration, one_line
from ddpexp.train.verdict import read_records, read_sentence, times_text

if TYPE_CHECKING:
    from rich.console import RenderableType


def status(call: Call) -> int:
    """Print how far a run or a sweep is.

    Raises:
        RefusedError: invalid arguments, or nothing there.
    """
    if len(call.operands) != 1:
        raise RefusedError(
            "takes one directory, of a run or of a sweep", place="status", suggestion="Type ddpexp status DIR."
        )
    place = Path(call.operands[0])
    paths = sweeps_and_runs(place)
    if paths != [place]:
        example = files.typed(paths[-1])
        raise RefusedError(
            f"is neither a run nor a sweep, but holds {len(paths)}",
            place=place,
            suggestion=f"Name one, such as {example}, or see ddpexp table.",
        )
    rows, goal = comparison.by_best(rows_of(place), goal_of(place))
    queue = states(row.job for row in rows if row.status == "submitted" and row.job is not None)
    is_sweep = SweepDir(place).is_sweep()
    if call.as_json:
        print_json(_sweep_as_dict(place, rows, goal, queue) if is_sweep else _run_as_dict(rows[0], queue))
    else:
        show(_sweep_status(place, rows, goal, queue) if is_sweep else _run_status(rows[0], queue))
    return EXIT_DONE


def _sweep_status(
    path: Path, rows: Sequence[Row], goal: Goal, queue: Mapping[ScheduledJob, JobState]
) -> RenderableType:
    from rich.console import Group as Lines
    from rich.text import Text

    order = ["running", "submitted", "failed", "broken", "killed", "interrupted", "stopped", "done", "waiting"]
    ordered = sorted(rows, key=lambda row: (order.index(row.status), row.number))
    first = ordered[: limit()]
    lines: list[RenderableType] = [Fitted(_status_grid(first, goal, queue))]
    if len(first) < len(ordered):
        lines.append(Text(f"... and {len(ordered) - len(first):,} more", style="dim"))
    lines += ["", *tables.summary(rows, goal)]
    owner = _owner(path)
    if owner is not None:
        lines.append(Text(f"the sweep runs: {one_line(str(owner))}, since {one_line(owner.since)}"))
    elif _is_unfinished(rows):
        lines.append(Text(f"resume: {_again(path)}"))
    return Lines(*lines)


def _sweep_as_dict(
    path: Path, rows: Sequence[Row], goal: Goal, queue: Mapping[ScheduledJob, JobState]
) -> dict[str, Any]:
    owner = _owner(path)
    return {
        "directory": str(path.absolute()),
        "objective": goal.metric,
        "mode": goal.mode,
        "by_best": goal.by_best,
        "where": str(owner) if owner is not None else None,
        "resume": _again(path) if owner is None and _is_unfinished(rows) else None,
        "jobs": [_run_as_dict(row, queue) for row in rows],
    }


def _run_as_dict(row: Row, queue: Mapping[ScheduledJob, JobState]) -> dict[str, Any]:
    return {**row_as_dict(row), "where": _where(row, queue) or None, "resume": resume_command(row) or None}


def _owner(path: Path) -> lock.Owner | None:
    """Return who runs a sweep, or may run it on another host."""
    owner = lock.read(path / lock.NAME)
    return owner if owner is not None and owner.is_alive() is not False else None


def _is_unfinished(rows: Sequence[Row]) -> bool:
    """Return whether a resume of the sweep would do anything; it leaves a job as it is that has diverged."""
    unfinished = [row for row in rows if row.status in (*UNFINISHED, "waiting")]
    return any(row.status != "failed" or not diverged(RunDir(row.path)) for row in unfinished)


def resume_command(row: Row) -> str:
    """Return the command that resumes a run; nothing if there is nothing to resume."""
    if row.status not in UNFINISHED:
        return ""
    arguments = ["resume", files.shortest(row.path), *typed_arguments(RunDir(row.path))]
    return f"python -m ddpexp {shlex.join(arguments)}"


def _status_grid(rows: Sequence[Row], goal: Goal, queue: Mapping[ScheduledJob, JobState]) -> Grid:
    metrics = [goal.name] if goal.name is not None else comparison.metrics_of(rows)[:1]
    columns = [
        Column("status", [row.status for row in rows]),
        Column("step", ["" if row.step is None else f"{row.step:,}" for row in rows], is_right=True, drop=0),
    ]
    for name in metrics:
        values = [tables.shown(name, comparison.columns_of(row, goal).get(name)) for row in rows]
        columns.append(Column(one_line(name), values, is_right=True))
    columns += [
        Column("since", [since(row) for row in rows]),
        Column("where", [_where(row, queue) for row in rows]),
        Column("directory", [one_line(row.name) for row in rows], drop=1, cut="end"),
    ]
    return Grid(columns)


def _run_status(row: Row, queue: Mapping[ScheduledJob, JobState]) -> RenderableType:
    from rich.console import Group as Lines
    from rich.text import Text

    best, records = row.best, read_records(RunDir(row.path))
    facts = {
        "status": f"{row.status}: {STATUSES[row.status]}",
        "step": "" if row.step is None else f"{row.step:,}",
        "metrics": "  ".join(f"{name} {tables.shown(name, value)}" for name, value in row.metrics.items()),
        "best": "" if best is None else f"{best.metric} {tables.shown(best.metric, best.value)} at step {best.step:,}",
        "since": since(row),
        "where": _where(row, queue),
        "times": times_text(records[-1]) if records else "",
        "verdict": read_sentence(RunDir(row.path), row.resolved, records),
        "why": row.message or "",
        "tags": " ".join(row.tags),
        "note": row.note,
        "resume": resume_command(row),
        "folder": files.relative(row.path),
    }
    return Lines(*(Text(f"{name:<8}{one_line(text)}") for name, text in facts.items() if text))


def since(row: Row) -> str:
    """Return since when the status of a run holds."""
    moment = row.ended if row.ended is not None else row.started
    if moment is None or not 0 <= moment < 1e11:
        return ""
    ago = duration(max(0.0, time.time() - moment))
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(moment))}{f' ({ago} ago)' if ago else ''}"


def _where(row: Row, queue: Mapping[ScheduledJob, JobState]) -> str:
    """Return where it runs or waits."""
    if row.status == "running":
        owner = lock.read(row.path / lock.NAME)
        return one_line(str(owner)) if owner is not None else ""
    if row.status == "submitted" and row.job is not None:
        state = queue.get(row.job)
        if state is None or state.is_over is None:
            text = f"{row.job.scheduler.label} does not answer here"
        else:
            text = "not in the queue" if state.name == FORGOTTEN else state.name
        return one_line(f"{row.job}: {text}")
    return ""


def _again(path: Path) -> str:
    """Return the command to resume a sweep, with the overrides that must be restated."""
    try:
        overrides, options = read_command(SweepDir(path))
    except RefusedError:  # unreadable: resuming reports that
        overrides, options = [], []
    arguments = ["resume", files.shortest(path), *options, *restated_overrides(overrides)]
    return one_line(f"python -m ddpexp {shlex.join(arguments)}")
