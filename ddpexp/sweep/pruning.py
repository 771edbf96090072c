"""Which runs, or checkpoints of runs, rules choose to remove, and what must stay whatever the rules say."""

from __future__ import annotations

import math
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddpexp.checkpoint.format import scan
from ddpexp.checkpoint.weights import best_of
from ddpexp.errors import RefusedError
from ddpexp.run import lock
from ddpexp.run.directory import RunDir, is_ours
from ddpexp.sweep.comparison import metrics_of
from ddpexp.sweep.folder import SweepDir
from ddpexp.sweep.job_status import NOT_ENDED
from ddpexp.sweep.rows import Row, directories
from ddpexp.system.files import typed


@dataclass(frozen=True)
class Removal:
    """What goes of a run."""

    row: Row
    paths: Sequence[Path]  # the run directory, or folders of checkpoints
    num_bytes: int


def older(rows: Sequence[Row], moment: float) -> list[Row]:
    """Return the runs that ended, or began if nothing says when they ended, before a moment."""
    moments = [(row, row.started if row.ended is None else row.ended) for row in rows]
    return [row for row, of_row in moments if of_row is not None and of_row < moment]


def best_rows(rows: Sequence[Row], keep_best: str, number: int) -> list[Row]:
    """Return the best runs by `min:METRIC` or `max:METRIC`; each counts by its best value if it keeps that."""
    mode, _, metric = keep_best.partition(":")
    sign = -1 if mode == "max" else 1

    def value(row: Row) -> float:
        is_kept = row.best is not None and (row.best.mode, row.best.metric) == (mode, metric)
        return row.best.value if is_kept and row.best is not None else row.metrics.get(metric, math.nan)

    having = [row for row in rows if math.isfinite(value(row))]
    return sorted(having, key=lambda row: sign * value(row))[:number]


def protected(rows: Sequence[Row], whole: bool) -> dict[Path, str]:
    """Return why runs stay, by their paths: of whole runs, or else of their older checkpoints."""
    reasons: dict[Path, str] = {}
    recipes: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        recipes[str(row.resolved.get("recipe.name"))].append(row)
    for of_recipe in recipes.values():
        ended = [row for row in of_recipe if row.status not in NOT_ENDED and row.started is not None]
        if ended:
            reasons[max(ended, key=lambda row: (row.started or 0.0, str(row.path))).path] = "the last of its recipe"
        for keep_best in _goals(of_recipe):
            reasons |= {
                row.path: f"the best of its recipe by {keep_best}" for row in best_rows(of_recipe, keep_best, 1)
            }
    reasons |= _begun_from(rows)
    for row in rows:
        if row.tags:
            reasons[row.path] = f"tagged {' '.join(row.tags)}"
        if row.status == "broken" or not is_ours(row.path):
            reasons[row.path] = "its files cannot be read"
        if row.status in NOT_ENDED:
            reasons[row.path] = row.status
        if whole and row.path not in reasons:
            if SweepDir(row.path.parent).is_sweep():
                reasons[row.path] = "a job of a sweep, of which --checkpoints removes checkpoints"
            elif (inner := _inner(row.path)) is not None:
                reasons[row.path] = f"the run {inner.name} lies in it"
    return reasons


def removal(row: Row, whole: bool) -> Removal:
    """Return what goes of a run: the whole, or its checkpoints but the best and the last one."""
    if whole:
        return Removal(row, [row.path], _size(row.path))
    with suppress(RefusedError):  # another version has written them
        complete = scan(RunDir(row.path).checkpoints).complete
        best = best_of(complete)
        paths = [one.folder for one in complete[1:] if best is None or one.folder != best.folder]
        return Removal(row, paths, sum(map(_size, paths)))
    return Removal(row, [], 0)


def remove(what: Removal) -> None:
    """Remove it, while no start can take the run. Raises: OSError; RefusedError if it runs by now."""
    run = RunDir(what.row.path)
    held = lock.take(run.path, run.ranks, f"prune {typed(run.path)}")
    try:
        for path in what.paths:
            gone = path
            if path != run.path:  # a start removes such a folder, should this command be killed
                gone = path.rename(path.with_name(f".{path.name}.removed"))
            shutil.rmtree(gone)
    finally:
        held.release()


def _goals(rows: Sequence[Row]) -> list[str]:
    """Return by what runs of a recipe are the best: what they keep the best by, or else the first of their metrics."""
    kept = {str(row.resolved["trainer.keep_best"]) for row in rows if row.resolved.get("trainer.keep_best") is not None}
    first = [name for name in metrics_of(rows) if "/" in name][:1]
    return sorted(kept) or [f"{'max' if 'accuracy' in name else 'min'}:{name}" for name in first]


def _begun_from(rows: Sequence[Row]) -> Mapping[Path, str]:
    """Return the runs that the configuration of another one names, such as in run.init_from, by whatever path."""
    named: dict[str, tuple[Path, str]] = {}
    for row in rows:
        for key, value in row.resolved.items():
            if isinstance(value, str) and key != "run.dir" and ("/" in value or key == "run.init_from"):
                named |= dict.fromkeys(Path(value).parts, (row.path, key))
    users = ((row.path, named.get(row.name)) for row in rows)
    return {path: f"{user[1]} of {user[0].name} names it" for path, user in users if user is not None}


def _inner(path: Path) -> Path | None:
    """Return a run or a sweep inside the directory of a run."""
    try:
        folders = [entry.path for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return None
    return next((inner for folder in folders for inner in directories(Path(folder))), None)


def _size(path: Path) -> int:
    return sum(_sizes(path))


def _sizes(path: Path) -> Iterator[int]:
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                yield os.lstat(os.path.join(folder, name)).st_size
