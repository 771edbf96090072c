"""The table of jobs as files: CSV and Markdown."""

from __future__ import annotations

import csv
import io
import os
import re
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from ddpexp.sweep.comparison import sorted_rows
from ddpexp.sweep.drawing import Drawing
from ddpexp.sweep.grid import Grid
from ddpexp.sweep.record import Goal
from ddpexp.sweep.rows import Row
from ddpexp.sweep.table import best_text, cell_text, count_text, jobs_grid, seeds_grid
from ddpexp.system import files
from ddpexp.system.terminal import print_message


def as_csv(rows: Sequence[Row]) -> str:
    """Return one line per job, with every override and every metric, as plain numbers."""
    keys = dict.fromkeys(key for row in rows for key in row.overrides)
    metrics = dict.fromkeys(name for row in rows for name in row.metrics)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    facts = ("step", "seconds", "started", "ended", "job_id", "message", "directory")
    writer.writerow(map(cell_text, ("job", "status", *keys, *metrics, *facts)))
    for row in rows:
        last = (
            row.step,
            row.seconds,
            _iso(row.started),
            _iso(row.ended),
            None if row.job is None else row.job.id,
            row.message,
            os.path.abspath(row.path),
        )
        cells = (
            row.number,
            row.status,
            *(row.overrides.get(key) for key in keys),
            *(row.metrics.get(name) for name in metrics),
        )
        writer.writerow(cell_text(cell) if isinstance(cell, str) else cell for cell in (*cells, *last))
    return text.getvalue()


def as_markdown(rows: Sequence[Row], goal: Goal) -> str:
    """Return the tables as GitHub-flavoured Markdown."""
    parts = [_markdown(jobs_grid(sorted_rows(rows, goal), goal, rows, full=True))]
    seeds = seeds_grid(rows, goal)
    if seeds is not None:
        parts.append(_markdown(seeds))
    return "\n".join([*parts, f"{_escaped(count_text(rows))}.{_escaped(best_text(rows, goal))}\n"])


def save(folder: Path, rows: Sequence[Row], goal: Goal, drawing: Drawing | None = None) -> None:
    """Write sweep.csv, sweep.md and the plot, each as a whole; report where they are, or why there is none."""
    try:
        files.write(folder / "sweep.csv", as_csv(rows))
        files.write(folder / "sweep.md", as_markdown(rows, goal))
    except OSError as error:
        print_message(
            f"ddpexp: warning: {folder} cannot be written ({error.strerror}), so the table is in no file: name another "
            "folder with ddpexp table ... --out FOLDER."
        )
        return
    names = ["sweep.csv", "sweep.md", *(["sweep.png"] if drawing is not None and drawing.finish() else [])]
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


def _escaped(text: str) -> str:
    """Escape a text for a Markdown table cell."""
    return re.sub(r"([\\|`*<>\[\]~]|(?<!\w)_|_(?!\w))", r"\\\1", text)


def _iso(moment: float | None) -> str | None:
    if moment is None or not 0 <= moment < 1e11:
        return None
    return datetime.fromtimestamp(moment).astimezone().isoformat(timespec="seconds")
