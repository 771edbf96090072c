"""The tables of jobs as text for files and for papers: CSV, Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
import os
import re
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ddpexp.sweep.arguments import Format
from ddpexp.sweep.as_json import group_records
from ddpexp.sweep.comparison import columns_of, over_seeds, sorted_rows
from ddpexp.sweep.drawing import Drawing
from ddpexp.sweep.grid import Grid
from ddpexp.sweep.record import Goal
from ddpexp.sweep.rows import Row
from ddpexp.sweep.table import FACTS, basis_text, best_text, cell_text, count_text, jobs_grid, means_grid
from ddpexp.system import files
from ddpexp.system.terminal import print_message

_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "<": "$<$", ">": "$>$",
    "|": "$|$", "±": "$\\pm$", "…": "\\dots{}",
}  # fmt: skip


def as_text(
    rows: Sequence[Row],
    goal: Goal,
    kind: Format,
    columns: Sequence[str] | None = None,
    seeds_only: bool = False,
) -> str:
    """Return what `ddpexp table --format` prints: the runs and the means over seeds; as CSV only one of them."""
    if kind == "csv":
        return seeds_as_csv(rows, goal) if seeds_only else as_csv(rows, goal)
    metrics = columns
    if columns is None:  # those that a text has
        columns = [name for name in jobs_grid([], goal, rows).header if name not in ("", *FACTS)]
    grids = _grids(rows, goal, columns, seeds_only, metrics)
    return (_as_latex if kind == "latex" else _as_markdown)(rows, goal, grids)


def as_csv(rows: Sequence[Row], goal: Goal) -> str:
    """Return one line per job, with the values of every key that differs or was typed and every metric, as numbers."""
    keys = dict.fromkeys(key for row in rows for key in row.values)
    metrics = dict.fromkeys(name for row in rows for name in columns_of(row, goal))
    facts = ("best_step", "step", "seconds", "started", "ended", "job_id", "message", "directory")
    lines = []
    for row in rows:
        values = columns_of(row, goal)
        last = (
            None if row.best is None else row.best.step,
            row.step,
            row.seconds,
            _iso(row.started),
            _iso(row.ended),
            None if row.job is None else row.job.id,
            row.message,
            os.path.abspath(row.path),
        )
        first = (row.number, row.status)
        lines.append([*first, *(row.values.get(key) for key in keys), *(values.get(name) for name in metrics), *last])
    return _csv(["job", "status", *keys, *metrics, *facts], lines)


def seeds_as_csv(rows: Sequence[Row], goal: Goal) -> str:
    """Return one line for each group and metric: mean, deviation, number and 95 % interval over seeds or folds."""
    records = group_records(rows, goal)
    names = dict.fromkeys(name for record in records for name in record)
    return _csv(list(names), [[record.get(name) for name in names] for record in records])


def _csv(header: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for line in [header, *lines]:
        writer.writerow(cell_text(cell) if isinstance(cell, str) else cell for cell in line)
    return text.getvalue()


def as_markdown(rows: Sequence[Row], goal: Goal) -> str:
    """Return the tables as GitHub-flavoured Markdown, with all columns."""
    return _as_markdown(rows, goal, _grids(rows, goal))


def _as_markdown(rows: Sequence[Row], goal: Goal, grids: Sequence[Grid]) -> str:
    basis = basis_text(rows, goal)
    parts = [*([f"{_escaped(basis)}\n"] if basis else []), *map(_markdown, grids)]
    return "\n".join([*parts, f"{_escaped(count_text(rows))}.{_escaped(best_text(rows, goal))}\n"])


def _as_latex(rows: Sequence[Row], goal: Goal, grids: Sequence[Grid]) -> str:
    """Return the tables as LaTeX, with the rules of the package booktabs."""
    count = f"{count_text(rows)}.{best_text(rows, goal)}"
    notes = ["\\usepackage{booktabs} in the preamble", basis_text(rows, goal), count]
    return "\n".join(["".join(f"% {note}\n" for note in notes if note), *map(_latex, grids)])


def _grids(
    rows: Sequence[Row],
    goal: Goal,
    columns: Sequence[str] | None = None,
    seeds_only: bool = False,
    metrics: Sequence[str] | None = None,
) -> list[Grid]:
    """Return the table of jobs, and that of the means over seeds; of `metrics`, if any is among them."""
    jobs = [] if seeds_only else [jobs_grid(sorted_rows(rows, goal), goal, rows, full=True, columns=columns)]
    means = means_grid(rows, goal, metrics)
    return [*jobs, *([means] if means is not None else [])]


def save(folder: Path, rows: Sequence[Row], goal: Goal, drawing: Drawing | None = None) -> None:
    """Write the tables and the plot, each as a whole; report where they are, or why there is none."""
    texts = {"sweep.csv": as_csv(rows, goal), "sweep.md": as_markdown(rows, goal)}
    if over_seeds(rows, goal):
        texts["sweep_seeds.csv"] = seeds_as_csv(rows, goal)
    try:
        for name, text in texts.items():
            files.write(folder / name, text)
    except OSError as error:
        print_message(
            f"ddpexp: warning: {folder} cannot be written ({error.strerror}), so the table is in no file: name another "
            "folder with ddpexp table ... --out FOLDER."
        )
        return
    names = [*texts, *(["sweep.png"] if drawing is not None and drawing.finish() else [])]
    print_message(f"written: {', '.join(names)} in {files.typed(folder)}", sys.stdout)


def _markdown(grid: Grid) -> str:
    lines = [grid.header, ["---:" if column.is_right else "---" for column in grid.columns], *grid.lines]
    texts = []
    for number, line in enumerate(lines):
        cells = line if number == 1 else [_escaped(cell) for cell in line]
        if grid.best is not None and number == grid.best + 2:
            cells = [f"**{cell}**" if cell else "" for cell in cells]
        texts.append(f"| {' | '.join(cells)} |\n")
    return "".join(texts)


def _latex(grid: Grid) -> str:
    header, *lines = [[_escaped_for_latex(cell) for cell in line] for line in [grid.header, *grid.lines]]
    if grid.best is not None:
        lines[grid.best] = [f"\\textbf{{{cell}}}" if cell else "" for cell in lines[grid.best]]
    rows = [f"{' & '.join(line)} \\\\" for line in [header, *lines]]
    alignment = "".join("r" if column.is_right else "l" for column in grid.columns)
    parts = [f"\\begin{{tabular}}{{{alignment}}}", "\\toprule", rows[0], "\\midrule", *rows[1:], "\\bottomrule"]
    return "\n".join([*parts, "\\end{tabular}\n"])


def _escaped_for_latex(text: str) -> str:
    """Escape a text for a cell of a LaTeX table."""
    parts = ("".join(_LATEX.get(character, character) for character in part) for part in text.split(" -> "))
    return " $\\to$ ".join(parts)


def _escaped(text: str) -> str:
    """Escape a text for a Markdown table cell."""
    return re.sub(r"([\\|`*<>\[\]~]|(?<!\w)_|_(?!\w))", r"\\\1", text)


def _iso(moment: float | None) -> str | None:
    if moment is None or not 0 <= moment < 1e11:
        return None
    return datetime.fromtimestamp(moment).astimezone().isoformat(timespec="seconds")
