"""The arguments of `ddpexp table`: `DIR... [sweep.objective=METRIC] [--out FOLDER] ...`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ddpexp.config.build import did_you_mean
from ddpexp.config.foreign import value_here
from ddpexp.errors import RefusedError
from ddpexp.sweep.folder import SweepDir
from ddpexp.sweep.record import Goal
from ddpexp.sweep.rows import Row, directories, goal_of, rows_of, with_defaults

_KEYS = ("sweep.objective", "sweep.mode")


@dataclass(frozen=True)
class Arguments:
    """The parsed arguments."""

    paths: Sequence[Path]  # the sweeps and runs
    objective: str | None = None
    mode: Literal["min", "max"] | None = None
    out: Path | None = None
    columns: Sequence[str] | None = None
    whole: bool = False  # all columns, however wide the terminal is
    csv: bool = False
    json: bool = False

    @classmethod
    def of(cls, operands: Sequence[str], options: Mapping[str, str]) -> Arguments:
        """Read directories, keys and options.

        Raises:
            RefusedError: an unknown key, or a directory that holds neither a sweep nor a run.
        """
        places, values = [], {**options}
        for operand in operands:
            key, equals, value = operand.partition("=")
            if (
                equals and re.fullmatch(r"[\w.]+", key) and not Path(operand).exists()
            ):  # a job's directory has = in its name too
                if key not in _KEYS:
                    suggestion = did_you_mean(key, _KEYS).lstrip()
                    raise RefusedError("is not a known key of table", key=key, value=value, suggestion=suggestion)
                values[key] = value
            else:
                places.append(Path(operand))
        mode = values.get("sweep.mode")
        if mode not in (None, "min", "max"):
            here = value_here("sweep.mode", mode)
            advice = f" Did you mean sweep.mode={here}?" if here else ""
            raise RefusedError(f"is not one of min, max.{advice}", key="sweep.mode", value=mode)
        paths = dict.fromkeys(path for place in places for path in look(place))
        ways = [option for option in ("--columns", "--all", "--csv", "--json") if option in values]
        if len(ways) > 1:
            raise RefusedError(
                f"{' and '.join(ways)} are incompatible: --csv, --json and --all have every column", place="table"
            )
        if "--out" in values and (prints := next((option for option in ("--csv", "--json") if option in values), None)):
            raise RefusedError(
                f"{prints} prints the table, but --out writes it into a folder, as sweep.csv too",
                place="table",
                suggestion="Use only one of them.",
            )
        out = Path(values["--out"]) if "--out" in values else None
        columns = [name for name in values["--columns"].split(",") if name] if "--columns" in values else None
        objective = values.get("sweep.objective")
        flags = ("--all" in values, "--csv" in values, "--json" in values)
        return cls(list(paths), objective, mode, out, columns, *flags)  # type: ignore[arg-type]

    @property
    def sweep(self) -> Path | None:
        """The sweep, if exactly one sweep and nothing else was named."""
        return self.paths[0] if len(self.paths) == 1 and SweepDir(self.paths[0]).is_sweep() else None

    def goal(self) -> Goal:
        """Return what to compare by: as given in the arguments, otherwise as the sweeps record it, if they agree."""
        goals = {goal for path in self.paths if (goal := goal_of(path)).metric is not None}
        goal = goals.pop() if len(goals) == 1 else Goal()
        if self.objective is not None and self.objective != goal.metric:
            goal = Goal(self.objective, "max" if "accuracy" in self.objective else "min")
        return goal if self.mode is None else replace(goal, mode=self.mode)

    def rows(self, metric: str | None) -> list[Row]:
        """Read them all."""
        rows = [row for path in self.paths for row in rows_of(path, metric)]
        return rows if self.sweep is not None else with_defaults(rows)


def look(place: Path) -> list[Path]:
    """Return the sweeps and runs that a path means.

    Raises:
        RefusedError: there are none.
    """
    paths = list(directories(place))
    if paths:
        return paths
    if place.is_file():
        raise RefusedError(
            "is a file", suggestion=f"Name the directory of a run or a sweep, such as {place.parent}.", place=place
        )
    if not place.is_dir():
        try:
            beside = [path.name for path in place.parent.iterdir() if path.is_dir()]
        except OSError:
            beside = []
        near = did_you_mean(place.name, beside, f"{place.parent}/")
        raise RefusedError(f"There is no such directory.{near if near.startswith(' Did') else ''}", place=place)
    raise RefusedError(
        "holds neither a sweep nor a run",
        suggestion="Name a directory of runs or sweeps, such as outputs/mnist.",
        place=place,
    )
