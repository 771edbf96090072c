"""`ddpexp.open_sweep`: the jobs of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpexp.cli.api.opened import Run, trusted
from ddpexp.errors import RefusedError
from ddpexp.run import directory as directories
from ddpexp.sweep.as_json import group_records, row_as_dict
from ddpexp.sweep.comparison import best_job, by_best
from ddpexp.sweep.folder import SweepDir
from ddpexp.sweep.record import Goal
from ddpexp.sweep.rows import Row, goal_of, rows_of


def open_sweep(
    directory: str | Path, *, config_dir: str | Path | None = None, trust: str | Sequence[str] = ()
) -> Sweep:
    """Open the directory of a sweep; nothing in it is changed, and no code that it names runs.

    The arguments are those of `open_run`, for its jobs.

    Raises:
        RefusedError: It is not the directory of a sweep.
    """
    path = Path(directory).expanduser()
    if not path.exists():
        raise RefusedError("There is no such directory", place=path)
    if not SweepDir(path).is_sweep():
        suggestion = "It is a run: use ddpexp.open_run." if directories.is_ours(path) else ""
        raise RefusedError("is not the directory of a sweep", place=path, suggestion=suggestion)
    return Sweep(path.absolute(), *trusted(config_dir, trust))


@dataclass(frozen=True)
class Sweep:
    """A sweep, as its directory has it now. Made by `open_sweep` and `ddpexp.sweep`.

    Attributes:
        path: The sweep's directory.
        config_dir: The config folder that is trusted for its jobs.
        trust: The names that are trusted for its jobs.
    """

    path: Path
    config_dir: str | None = None
    trust: tuple[str, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """Return what is known of each job, as `ddpexp table FOLDER --json` prints it."""
        return [row_as_dict(row) for row in self._compared()[0]]

    def groups(self) -> list[dict[str, Any]]:
        """Return the means over seeds or folds, a record for each metric of each group of jobs, as pandas takes them.

        A record has the values that the group shares by their keys, `metric`, `mean`, `std`, `n`, and `low` and `high`,
        the ends of the 95 % confidence interval of the mean (Student's t).
        """
        return group_records(*self._compared())

    @property
    def runs(self) -> list[Run]:
        """The jobs that have a run directory, in their order."""
        return [self._run(row.path) for row in rows_of(self.path) if directories.is_ours(row.path)]

    @property
    def best(self) -> Run:
        """The job with the best value of `sweep.objective`.

        Raises:
            RefusedError: The sweep has no objective, or no job has a value of it.
        """
        return self._run(best_job(self.path).path)

    def _compared(self) -> tuple[list[Row], Goal]:
        return by_best(rows_of(self.path), goal_of(self.path))

    def _run(self, path: Path) -> Run:
        return Run(path, self.config_dir, self.trust)
