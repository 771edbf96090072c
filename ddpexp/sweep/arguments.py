"""The arguments of `ddpexp table`: `DIR... [sweep.objective=METRIC] [--out FOLDER] ...`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

from ddpexp.config.build import convert, did_you_mean, nearest
from ddpexp.errors import RefusedError
from ddpexp.settings.key import Key
from ddpexp.settings.metrics import TEST_SET, check_not_test
from ddpexp.sweep.comparison import by_best, metrics_of
from ddpexp.sweep.folder import SweepDir
from ddpexp.sweep.record import Goal
from ddpexp.sweep.rows import Row, directories, goal_of, rows_of, with_values

Format: TypeAlias = Literal["csv", "latex", "markdown"]
_FORMAT = Key(
    synonyms={"latex": "tex booktabs tabular", "markdown": "md gfm github"},
    advice={
        "json": "Type --json in place of --format json.",
        **dict.fromkeys(("excel", "xlsx", "tsv", "pandas"), "Type --format csv, which such programs read."),
        **dict.fromkeys(("html", "png"), "Type --format markdown; --out FOLDER writes the plot, sweep.png, too."),
    },
)
_KEYS = ("sweep.objective", "sweep.mode")


@dataclass(frozen=True)
class TableArguments:
    """What was typed.

    Raises:
        RefusedError: options are incompatible.
    """

    paths: Sequence[Path]  # of the sweeps and runs
    objective: str | None = None
    mode: Literal["min", "max"] | None = None
    out: str | None = None
    columns: str | None = None  # with commas between them
    all: bool = False  # columns, however wide the terminal is
    format: Annotated[Format | None, _FORMAT] = None
    seeds: bool = False  # the means over seeds alone
    json: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        whole = [
            *(["--all"] if self.all else []),
            *(["--format csv"] if self.format == "csv" else []),
            *(["--json"] if self.json else []),
        ]
        ways = [*(["--columns"] if self.columns is not None else []), *whole]
        if len(ways) > 1:
            raise RefusedError(
                f"{' and '.join(ways)} are incompatible: each of --format csv, --json and --all prints every column in "
                "a form of its own",
                place="table",
                suggestion=f"Type only {ways[-1]}, for example.",
            )
        if self.json and (self.format is not None or self.seeds):
            raise RefusedError(
                "--json prints everything, the means over seeds too, as JSON", place="table", suggestion="Use it alone."
            )
        if self.out is not None and (self.format is not None or self.json):
            raise RefusedError(
                f"{'--json' if self.json else '--format'} prints the table, but --out writes it into a folder, as "
                "sweep.csv and sweep.md",
                place="table",
                suggestion="Use only one of them.",
            )

    @classmethod
    def of(cls, operands: Sequence[str], verb: str = "table") -> TableArguments:
        """Read directories and keys; the options are added by `Call.typed`.

        Raises:
            RefusedError: an unknown key, an objective of the set `test`, or a directory without a sweep or a run.
        """
        folders, values = [], {}
        for operand in operands:
            key, equals, value = operand.partition("=")
            if not equals or not re.fullmatch(r"[\w.]+", key) or Path(operand).exists():  # job directories have = too
                folders.append(Path(operand))
            elif key in _KEYS:
                values[key] = value
            else:
                suggestion = did_you_mean(key, _KEYS)
                raise RefusedError(f"is not a known key of {verb}", key=key, value=value, suggestion=suggestion)
        if (objective := values.get("sweep.objective")) is not None:
            check_not_test("sweep.objective", objective, objective)
        mode = values.get("sweep.mode")
        if mode is not None:
            mode = convert(mode, Literal["min", "max"], "sweep.mode")
        paths = dict.fromkeys(path for folder in folders for path in sweeps_and_runs(folder))
        return cls(list(paths), objective, mode)

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
        return rows if self.sweep is not None else with_values(rows)

    def compared(self) -> tuple[list[Row], Goal]:
        """Read them all, each with the value that it counts by.

        Raises:
            RefusedError: none has recorded the objective.
        """
        goal = self.goal()
        rows, goal = by_best(self.rows(goal.metric), goal)
        metrics = metrics_of(rows)
        if goal.metric is not None and metrics and all(row.objective is None for row in rows):
            chosen_by = [name for name in metrics if name.partition("/")[0] != TEST_SET] or metrics
            suggestion = meant_name(goal.metric, chosen_by, "sweep.objective=")
            raise RefusedError(
                "is not recorded by any of these", key="sweep.objective", value=goal.metric, suggestion=suggestion
            )
        return rows, goal


def meant_name(name: str, known: Sequence[str], prefix: str = "") -> str:
    """Say what a name may be short for, such as lr for optimizer.lr, or else what it is like."""
    near = meant(name, known)
    return did_you_mean(name, known, prefix) if near is None else f"Did you mean {prefix}{near}?"


def meant(name: str, names: Sequence[str]) -> str | None:
    """Return the first of the names of which this is the last part, or its begin, or else the most similar one."""
    last = [(re.split(r"[./]", one)[-1], one) for one in names]
    same = [one for part, one in last if part == name]
    longer = [one for part, one in last if len(name) > 1 and part.startswith(name)]
    return next(iter([*same, *longer]), None) or nearest(name, names)


def formats() -> tuple[str, ...]:
    """Return the values of --format."""
    return get_args(Format)


def sweeps_and_runs(path: Path) -> list[Path]:
    """Return the directories of sweeps and runs that are at a path or below it.

    Raises:
        RefusedError: there are none.
    """
    paths = list(directories(path))
    if paths:
        return paths
    if path.is_file():
        raise RefusedError(
            "is a file", suggestion=f"Name the directory of a run or a sweep, such as {path.parent}.", place=path
        )
    if not path.is_dir():
        try:
            others = [beside.name for beside in path.parent.iterdir() if beside.is_dir()]
        except OSError:
            others = []
        near = did_you_mean(path.name, others, f"{path.parent}/")
        raise RefusedError(f"There is no such directory.{f' {near}' if near.startswith('Did') else ''}", place=path)
    raise RefusedError(
        "holds neither a sweep nor a run",
        suggestion="Name a directory of runs or sweeps, such as outputs/mnist.",
        place=path,
    )
