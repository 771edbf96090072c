"""The commands that inspect directories: `ddpexp table` and `ddpexp status`.

They read, and start nothing but the drawing.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpexp.config import commands
from ddpexp.config.build import did_you_mean
from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.run import lock
from ddpexp.run.directory import RunDir
from ddpexp.run.resume_arguments import typed_arguments
from ddpexp.sweep import comparison, table_files
from ddpexp.sweep import table as tables
from ddpexp.sweep.arguments import Arguments, look
from ddpexp.sweep.as_json import row_as_dict, table_as_dict
from ddpexp.sweep.folder import SweepDir, read_command, restated_overrides
from ddpexp.sweep.grid import Fitted, Grid, limit, show
from ddpexp.sweep.job_status import STATUSES
from ddpexp.sweep.rows import UNFINISHED, Goal, Row, goal_of, rows_of, with_defaults
from ddpexp.system import files
from ddpexp.system.job_schedulers import ScheduledJob, states
from ddpexp.system.job_schedulers.base import FORGOTTEN, JobState
from ddpexp.system.programs import python
from ddpexp.system.terminal import print_json, print_message
from ddpexp.system.text import one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

_TABLE = f"""{commands.of("table").usage}

Show what is in directories as a table, the best first: a sweep, runs, or a
folder that holds some, such as outputs/mnist. Columns are the values that
differ, then the metric (sweep.mode=max: more is better). With seeds among them
a second table has their mean and std. A terminal gets as many columns as fit,
those that distinguish most runs; a file or a pipe gets all of them.
Of one sweep it also writes sweep.csv, sweep.md and sweep.png into its
directory, of anything into the FOLDER behind --out.

  --columns A,B,...  these columns: keys of the configuration, metrics, status,
                     step, time, directory
  --all              all columns, on a terminal too
  --csv              one line a run with all overrides and every metric, as
                     plain numbers; writes no file
  --json             the same for programs, with the means over seeds
  --out FOLDER       where to write the files"""

_STATUS = f"""{commands.of("status").usage}

Show how far a run or the jobs of a sweep are, where they run, and what to type
to resume them. --json prints the same for programs.
""" + "".join(f"\n  {name:<13}{meaning}" for name, meaning in STATUSES.items())

_DRAWING_SECONDS = 120.0


def table(argv: Sequence[str]) -> int:
    """Print the table of the directories in `argv`, and write it to files on request, or if it is of one sweep.

    Raises:
        RefusedError: invalid arguments, or nothing there.
    """
    if {"--help", "-h"} & set(argv):
        print(_TABLE)
        return EXIT_DONE
    arguments = Arguments.of("table", argv)
    goal = arguments.goal()
    rows = arguments.rows(goal.metric)
    metrics = comparison.metrics_of(rows)
    if goal.metric is not None and metrics and all(row.objective is None for row in rows):
        raise RefusedError(
            f"sweep.objective={goal.metric}: none of these has recorded "
            f"that.{did_you_mean(goal.metric, metrics, 'sweep.objective=')}"
        )
    if arguments.csv:
        print_message(table_files.as_csv(rows).rstrip("\n"), sys.stdout)
        return EXIT_DONE
    if arguments.json:
        print_json(table_as_dict(rows, goal))
        return EXIT_DONE
    again = f"python -m ddpexp table {shlex.join([*argv, '--all'])}"
    chosen = rows if arguments.columns is None else _with_columns(rows, arguments.columns)
    whole = arguments.whole or arguments.columns is not None
    show(tables.render(chosen, goal, limit(), columns=arguments.columns, again=again), whole)
    if goal.metric is None and metrics:
        print_message(
            f"to have the best marked: sweep.objective={metrics[0]}, with sweep.mode=max where more is better",
            sys.stdout,
        )
    folder = arguments.out or arguments.sweep
    if folder is not None:
        _save(folder, arguments, rows, goal)
    return EXIT_DONE


def status(argv: Sequence[str]) -> int:
    """Print how far the run or the sweep in `argv` is.

    Raises:
        RefusedError: invalid arguments, or nothing there.
    """
    if {"--help", "-h"} & set(argv):
        print(_STATUS)
        return EXIT_DONE
    places = [word for word in argv if word != "--json"]
    option = next((word for word in places if word.startswith("-")), None)
    if option is not None:
        raise RefusedError(f"status {option}: no such option.{did_you_mean(option, ['--help', '--json'])}")
    if len(places) != 1:
        raise RefusedError("status takes one directory, of a run or of a sweep, and --json: ddpexp status DIR.")
    place = Path(places[0])
    paths = look(place)
    if paths != [place]:
        example = files.typed(paths[-1])
        raise RefusedError(
            f"{place} is no run and no sweep, but holds {len(paths)}: name one, such as {example}, or see ddpexp table."
        )
    rows = rows_of(place)
    queue = states(row.job for row in rows if row.status == "submitted" and row.job is not None)
    is_sweep = SweepDir(place).is_sweep()
    if len(places) < len(argv):
        print_json(_sweep_as_dict(place, rows, queue) if is_sweep else _run_as_dict(rows[0], queue))
    else:
        show(_sweep_status(place, rows, goal_of(place), queue) if is_sweep else _run_status(rows[0], queue))
    return EXIT_DONE


def _with_columns(rows: Sequence[Row], columns: Sequence[str]) -> list[Row]:
    """Add the values of named columns that are keys, which only the configurations may have.

    Raises:
        RefusedError: nothing has such a column.
    """
    filled = with_defaults(rows, columns)
    names = {*tables.FACTS, *(name for row in filled for name in (*row.overrides, *row.metrics))}
    for name in columns:
        if name not in names:
            raise RefusedError(
                f"--columns {name}: none of these has such a key or "
                f"metric.{did_you_mean(name, sorted(names), '--columns ')}"
            )
    return filled


def _save(folder: Path, arguments: Arguments, rows: Sequence[Row], goal: Goal) -> None:
    """Write the files; report where they are, or why they could not be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        table_files.save(folder, rows, goal)
    except OSError as error:
        print_message(
            f"ddpexp: {folder} cannot be written ({error.strerror}), so the table is in no file: name a folder with "
            "--out FOLDER."
        )
        return
    names = ["sweep.csv", "sweep.md", *(["sweep.png"] if _draw(folder, arguments, goal) else [])]
    print_message(f"written: {', '.join(names)} in {files.typed(folder)}", sys.stdout)


def _draw(folder: Path, arguments: Arguments, goal: Goal) -> bool:
    """Draw the plot in a separate process: the plotting library is large, and has its own exit handlers."""
    argv = [*map(files.shortest, arguments.paths), "--out", str(folder)]
    argv += [f"sweep.objective={goal.metric}", f"sweep.mode={goal.mode}"] if goal.metric is not None else []
    program = python("ddpexp.sweep.picture:main", argv)
    try:
        done = subprocess.run(
            program, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_DRAWING_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print_message(f"ddpexp: sweep.png is left out: {error}")
        return False
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        print_message(
            f"ddpexp: sweep.png is left out: {lines[-1] if lines else f'drawing ended with {done.returncode}'}"
        )
    return done.returncode == 0


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


def _sweep_as_dict(path: Path, rows: Sequence[Row], queue: Mapping[ScheduledJob, JobState]) -> dict[str, Any]:
    goal, owner = goal_of(path), _owner(path)
    return {
        "directory": str(path.absolute()),
        "objective": goal.metric,
        "mode": goal.mode,
        "where": str(owner) if owner is not None else None,
        "resume": _again(path) if owner is None and _is_unfinished(rows) else None,
        "jobs": [_run_as_dict(row, queue) for row in rows],
    }


def _run_as_dict(row: Row, queue: Mapping[ScheduledJob, JobState]) -> dict[str, Any]:
    return {**row_as_dict(row), "where": _where(row, queue) or None, "resume": _resume(row) or None}


def _owner(path: Path) -> lock.Owner | None:
    """Return who runs a sweep, or may run it on another host."""
    owner = lock.read(path / lock.NAME)
    return owner if owner is not None and owner.is_alive() is not False else None


def _is_unfinished(rows: Sequence[Row]) -> bool:
    return any(row.status in (*UNFINISHED, "waiting") for row in rows)


def _resume(row: Row) -> str:
    if row.status not in UNFINISHED:
        return ""
    arguments = ["resume", files.shortest(row.path), *typed_arguments(RunDir(row.path))]
    return f"python -m ddpexp {shlex.join(arguments)}"


def _status_grid(rows: Sequence[Row], goal: Goal, queue: Mapping[ScheduledJob, JobState]) -> Grid:
    metrics = [goal.metric] if goal.metric is not None else comparison.metrics_of(rows)[:1]
    header = ["status", "step", *map(one_line, metrics), "since", "where", "directory"]
    lines = [
        [
            row.status,
            "" if row.step is None else f"{row.step:,}",
            *(tables.shown(name, row.metrics.get(name, row.objective)) for name in metrics),
            _since(row),
            _where(row, queue),
            one_line(row.name),
        ]
        for row in rows
    ]
    right = [False, True, *[True] * len(metrics), False, False, False]
    return Grid(header, lines, right, leaves=[header.index("step"), len(header) - 1])


def _run_status(row: Row, queue: Mapping[ScheduledJob, JobState]) -> RenderableType:
    from rich.console import Group as Lines
    from rich.text import Text

    facts = {
        "status": f"{row.status}: {STATUSES[row.status]}",
        "step": "" if row.step is None else f"{row.step:,}",
        "metrics": "  ".join(f"{name} {tables.shown(name, value)}" for name, value in row.metrics.items()),
        "since": _since(row),
        "where": _where(row, queue),
        "why": row.message or "",
        "resume": _resume(row),
        "folder": files.relative(row.path),
    }
    return Lines(*(Text(f"{name:<8}{one_line(text)}") for name, text in facts.items() if text))


def _since(row: Row) -> str:
    """Return since when the status holds."""
    moment = row.ended if row.ended is not None else row.started
    if moment is None or not 0 <= moment < 1e11:
        return ""
    ago = tables.duration(max(0.0, time.time() - moment))
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
