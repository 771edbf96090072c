"""The words to look at directories with, `DIR... [sweep.objective=METRIC] [--out FOLDER] ...`, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ddpexp.config.build import did_you_mean
from ddpexp.errors import RefusedError
from ddpexp.sweep.folder import SweepDir
from ddpexp.sweep.rows import Goal, Row, directories, goal_of, rows_of, with_defaults

_KEYS = ("sweep.objective", "sweep.mode")
VALUED = {"--out": "a folder behind it: --out FOLDER", "--columns": "names behind it: --columns optimizer.lr,eval/loss"}
FLAGS = ("--all", "--csv")


@dataclass(frozen=True)
class Arguments:
    """The words."""

    found: Sequence[Path]  # the sweeps and runs
    objective: str | None
    mode: Literal["min", "max"] | None
    out: Path | None
    columns: Sequence[str] | None = None
    whole: bool = False  # all columns, however wide the terminal is
    csv: bool = False

    @classmethod
    def of(cls, verb: str, argv: Sequence[str]) -> Arguments:
        """Read the words behind a verb.

        Raises:
            RefusedError: one that is not known, or a directory that holds nothing to look at.
        """
        places, values = [], {}
        words = iter(argv)
        for word in words:
            key, equals, value = word.partition("=")
            if key in VALUED:
                values[key] = value if equals else next(words, "")
                if not values[key]:
                    raise RefusedError(f"{verb} {key} needs {VALUED[key]}.")
            elif word in FLAGS:
                values[word] = word
            elif word.startswith("-"):
                advice = did_you_mean(key, [*VALUED, *FLAGS, "--help"])
                if key in ("--sort", "--sort-by", "--order-by"):
                    advice = " The rows are sorted by sweep.objective=METRIC, in the order of sweep.mode=min or max."
                raise RefusedError(f"{verb} {word}: no such option.{advice}")
            elif (
                equals and re.fullmatch(r"[\w.]+", key) and not Path(word).exists()
            ):  # a job's directory has = in its name too
                if key not in _KEYS:
                    raise RefusedError(f"{verb} {word}: {key} is not a known key.{did_you_mean(key, _KEYS)}")
                values[key] = value
            else:
                places.append(Path(word))
        if not places:
            raise RefusedError(
                f"{verb} of what? Name a sweep, a run, or a folder that holds some, such as outputs/mnist."
            )
        mode = values.get("sweep.mode")
        if mode not in (None, "min", "max"):
            raise RefusedError(f"sweep.mode={mode} is not one of min, max.")
        found = dict.fromkeys(path for place in places for path in look(place))
        ways = [option for option in ("--columns", "--all", "--csv") if option in values]
        if len(ways) > 1:
            raise RefusedError(f"{verb}: {' and '.join(ways)} do not go together: --csv and --all have every column.")
        if "--csv" in values and "--out" in values:
            raise RefusedError(f"{verb}: --csv prints what --out writes into a folder as sweep.csv: type one of them.")
        out = Path(values["--out"]) if "--out" in values else None
        columns = [name for name in values["--columns"].split(",") if name] if "--columns" in values else None
        objective = values.get("sweep.objective")
        return cls(list(found), objective, mode, out, columns, "--all" in values, "--csv" in values)  # type: ignore[arg-type]

    @property
    def sweep(self) -> Path | None:
        """The sweep, where nothing but a single one was named."""
        return self.found[0] if len(self.found) == 1 and SweepDir(self.found[0]).is_sweep() else None

    def goal(self) -> Goal:
        """Return what to compare by: what was typed, or else what the sweeps say, where they agree."""
        goals = {goal for path in self.found if (goal := goal_of(path)).metric is not None}
        goal = goals.pop() if len(goals) == 1 else Goal()
        if self.objective is not None and self.objective != goal.metric:
            goal = Goal(self.objective, "max" if "accuracy" in self.objective else "min")
        return goal if self.mode is None else replace(goal, mode=self.mode)

    def rows(self, metric: str | None) -> list[Row]:
        """Read them all."""
        rows = [row for path in self.found for row in rows_of(path, metric)]
        return rows if self.sweep is not None else with_defaults(rows)


def look(place: Path) -> list[Path]:
    """Return the sweeps and runs that a path means.

    Raises:
        RefusedError: there are none.
    """
    found = list(directories(place))
    if found:
        return found
    if place.is_file():
        raise RefusedError(f"{place} is a file: name the directory of a run or a sweep, such as {place.parent}.")
    if not place.is_dir():
        try:
            beside = [path.name for path in place.parent.iterdir() if path.is_dir()]
        except OSError:
            beside = []
        near = did_you_mean(place.name, beside, f"{place.parent}/")
        raise RefusedError(f"{place}: there is no such directory.{near if near.startswith(' Did') else ''}")
    raise RefusedError(f"{place} holds no sweep and no run: name a directory that does, such as outputs/mnist.")
