"""The command `ddpexp table`: compare sweeps and runs; it starts nothing but the drawing."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from ddpexp.cli.verb import Call
from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.sweep import comparison, table_files
from ddpexp.sweep import table as tables
from ddpexp.sweep.arguments import TableArguments, meant
from ddpexp.sweep.as_json import table_as_dict
from ddpexp.sweep.comparison import LAST
from ddpexp.sweep.drawing import Drawing
from ddpexp.sweep.grid import limit, show
from ddpexp.sweep.record import Goal
from ddpexp.sweep.rows import Row, with_values
from ddpexp.system.terminal import print_json, print_message


def table(call: Call) -> int:
    """Print the table of directories, and write it to files on request, or if it is of one sweep.

    Raises:
        RefusedError: invalid arguments, or nothing there.
    """
    _check_words(call)
    arguments = call.typed(TableArguments.of(call.operands))
    rows, goal = arguments.compared()
    metrics = comparison.metrics_of(rows)
    if arguments.seeds and not comparison.over_seeds(rows, goal):
        raise RefusedError(
            "is for runs that differ in trainer.seed or data.fold, and these do not",
            place="table --seeds",
            suggestion="Leave it out.",
        )
    if arguments.json:
        print_json(table_as_dict(rows, goal))
        return EXIT_DONE
    columns, chosen = None, rows
    if arguments.columns is not None:
        typed = [name for name in arguments.columns.split(",") if name]
        columns = [comparison.chosen_column(name, rows, goal) for name in typed]
        chosen = _with_columns(rows, goal, columns)
        if arguments.seeds and not any(name.removeprefix(LAST) in _metrics(chosen, goal) for name in columns):
            raise RefusedError(
                "names no metric, and the means have the keys that tell runs apart by themselves",
                place=f"--seeds --columns {arguments.columns}",
                suggestion=f"Name a metric, for example --columns {metrics[0]}." if metrics else "",
            )
    elif arguments.all:
        columns = tables.all_columns(rows, goal)
    if arguments.format is not None:
        text = table_files.as_text(chosen, goal, arguments.format, columns, arguments.seeds)
        print_message(text.rstrip("\n"), sys.stdout)
        return EXIT_DONE
    again = f"python -m ddpexp table {shlex.join([*call.command[2:], '--all'])}"
    shown = tables.render(chosen, goal, limit(), columns=columns, again=again, seeds_only=arguments.seeds)
    show(shown, whole=columns is not None)
    if goal.metric is None and metrics:
        print_message(
            f"to have the best marked: sweep.objective={metrics[0]}, with sweep.mode=max where more is better",
            sys.stdout,
        )
    folder = arguments.sweep if arguments.out is None else Path(arguments.out)
    if folder is not None:
        with suppress(OSError):  # `save` reports it
            folder.mkdir(parents=True, exist_ok=True)
        with closing(Drawing(arguments.paths, goal, folder)) as drawing:
            table_files.save(folder, rows, goal, drawing)
    return EXIT_DONE


def _with_columns(rows: Sequence[Row], goal: Goal, columns: Sequence[str]) -> list[Row]:
    """Add the values of named columns that are keys, which only the configurations may have, or measures of the steps.

    Raises:
        RefusedError: nothing has such a column.
    """
    rows = [
        replace(row, metrics={**row.metrics, **{name: row.measured[name] for name in columns if name in row.measured}})
        for row in rows
    ]
    filled = with_values(rows, [name for name in columns if any(_has_key(row, name) for row in rows)])
    names = {
        *(tables.BEST_STEP, *tables.FACTS, *tables.LABELS),
        *(
            name
            for row in filled
            for name in (*row.resolved, *row.values, *row.measured, *comparison.columns_of(row, goal))
        ),
    }
    unknown = [name for name in columns if name.removeprefix(LAST) not in names]
    if unknown:
        metrics = sorted(_metrics(rows, goal), key=lambda metric: metric.startswith("train/"))
        first = [*comparison.varying(rows), *metrics, *tables.FACTS]
        near = {name: meant(name, [*first, *sorted(names)]) for name in unknown}
        corrected = ",".join(near.get(name) or name for name in columns)
        name = next((name for name in unknown if near[name] is None), None)
        raise RefusedError(
            "is not a key or metric of any of these"
            if len(unknown) == 1 or name
            else "are no keys or metrics of these",
            place=f"--columns {','.join(unknown) if name is None else name}",
            # The list of all keys would be long.
            suggestion=f"Did you mean --columns {corrected}?" if name is None else f"Available: {', '.join(first)}.",
        )
    return filled


def _check_words(call: Call) -> None:
    """Check what a shell has taken apart, and what other programs write to a file.

    Raises:
        RefusedError: a list with a blank in it, or a file in place of a folder.
    """
    columns, out = call.options.get("--columns", ""), call.options.get("--out", "")
    if columns.endswith(",") and call.operands and not os.path.exists(call.operands[-1]):
        both = f"{columns}{call.operands[-1]}"
        raise RefusedError(
            "A blank separates arguments", place=f"--columns {columns}", suggestion=f"Type --columns {both}."
        )
    kind = {".csv": "csv", ".md": "markdown", ".tex": "latex"}.get(os.path.splitext(out)[1])
    if kind is not None and not os.path.isdir(out):
        raise RefusedError(
            "names a file, and the option takes a folder",
            place=f"--out {out}",
            suggestion=f"Type --format {kind} > {shlex.quote(out)}, without --out.",
        )


def _metrics(rows: Sequence[Row], goal: Goal) -> list[str]:
    """Return the names of the columns that are metrics."""
    return list(dict.fromkeys(name for row in rows for name in comparison.columns_of(row, goal)))


def _has_key(row: Row, name: str) -> bool:
    """Return whether a run has a key, or a section, of this name."""
    return any(key == name or key.startswith(f"{name}.") for key in row.resolved)
