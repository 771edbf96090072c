"""The command `ddpexp diff`: what runs differ in; it starts nothing."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddpexp.cli.verb import Call
from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.run.provenance import without_inner
from ddpexp.run.stored_run import find_run
from ddpexp.sweep.diff import RunsDiff, cell, compare_runs, result_cell
from ddpexp.sweep.folder import SweepDir
from ddpexp.sweep.grid import show
from ddpexp.sweep.rows import directories, rows_of
from ddpexp.system import files
from ddpexp.system.terminal import print_json, print_message

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = 12  # runs beside one another in a terminal


def diff(call: Call) -> int:
    """Print what runs differ in.

    Raises:
        RefusedError: fewer than two runs, more than a terminal has columns for, or a directory that holds none.
    """
    paths = runs_of(call.operands, call.name)
    if len(paths) > _COLUMNS and not call.as_json:
        raise RefusedError(
            f"compares up to {_COLUMNS} runs in columns, and these are {len(paths)}",
            place=shlex.join([call.name, *call.operands]),
            suggestion=f"Type python -m ddpexp table {shlex.join(call.operands)}, or name some; --json has all.",
        )
    compared = compare_runs(paths)
    if call.as_json:
        print_json(compared.as_dict())
        return EXIT_DONE
    show(_table(compared))
    for text in _sentences(compared):
        print_message(text, sys.stdout)
    return EXIT_DONE


def runs_of(sources: Sequence[str], name: str) -> list[Path]:
    """Return the directories of runs; a sweep, or a folder of runs, stands for those in it that have begun.

    Raises:
        RefusedError: fewer than two, one twice, or one that is none.
    """
    typed, below = [], []
    for source in sources:
        if "=" in source and not Path(source).exists():
            raise RefusedError("takes directories of runs alone", place=name, suggestion=f"Leave {source} out.")
        found = list(directories(Path(source)))
        if found in ([], [Path(source)]) and not SweepDir(Path(source)).is_sweep():
            typed.append(find_run(source, name).path)
        else:
            below += [row.path for path in found for row in rows_of(path) if row.resolved]
    known = {path.resolve() for path in typed}
    paths = [*typed, *(path for path in below if path.resolve() not in known)]
    if len({path.resolve() for path in paths}) < max(2, len(paths)):
        raise RefusedError(
            "compares two runs or more, each named once",
            place=shlex.join([name, *sources]),
            suggestion="How far one run is, and where: python -m ddpexp status RUN_DIR.",
        )
    return paths


def _table(compared: RunsDiff) -> Table:
    """Return the table: a line for each key that differs and each result, a column for each run."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("", overflow="fold")
    for run in compared.runs:
        table.add_column(Text(files.relative(run.row.path)), overflow="fold")
    for group, keys in compared.groups().items():
        table.add_row(Text(group, "bold"))
        for key, values in without_inner({key: tuple(values) for key, values in keys.items()}).items():
            cells = iter(values)
            texts = ["cannot be read" if run.problem else cell(next(cells)) for run in compared.runs]
            table.add_row(*map(Text, (f"  {key}", *texts)))
    table.add_row(Text("results", "bold"))
    for key, results in compared.results().items():
        table.add_row(*map(Text, (f"  {key}", *(result_cell(key, value) for value in results))))
    return table


def _sentences(compared: RunsDiff) -> list[str]:
    """Return what is said below the table."""
    sentences = [f"{files.typed(run.row.path)}: {run.problem}" for run in compared.runs if run.problem is not None]
    sentences += [
        f"{files.typed(run.row.path)} has no record of its {', '.join(run.unrecorded)}"
        for run in compared.readable
        if run.unrecorded
    ]
    if not compared.groups() and len(compared.readable) > 1:
        sentences.append("nothing differs in configuration, code, versions, data, machine and starts")
    if compared.has_equal_weights:
        sentences.append("the weights of all are equal, to the bit")
    return sentences
