"""What runs differ in, with their results beside it (`ddpexp diff`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from ddpexp.checkpoint.weights import Best
from ddpexp.config.keys import MISSING
from ddpexp.errors import RefusedError
from ddpexp.run.difference_texts import spans, texts, value_text
from ddpexp.run.differences import Value, over_steps
from ddpexp.run.directory import RunDir
from ddpexp.run.history import RunStart, periods_of, starts_of
from ddpexp.run.provenance import GROUPS, SAMPLES, Groups, differences, provenance, provenance_of
from ddpexp.sweep.as_json import finite, row_as_dict
from ddpexp.sweep.grid import without_middle
from ddpexp.sweep.rows import Row, rows_of
from ddpexp.system.text import first_few, metric_text

_OF_STARTS = ("code", "versions", "machine")  # groups that may change from one start of a run to the next
_SHOWN = 5  # changes of a group from one start to the next
_HASH = 12
_CELL = 120  # characters of a cell


@dataclass(frozen=True)
class ComparedRun:
    """A run as it is compared."""

    row: Row
    groups: Groups = field(default_factory=dict)  # what it was trained with; empty if it cannot be read
    starts: Sequence[RunStart] = ()
    over_steps: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)  # the keys that have changed
    weights_sha256: str | None = None  # of the end
    problem: str | None = None  # why it cannot be read

    @property
    def unrecorded(self) -> list[str]:
        """The groups of which nothing is recorded, where that is no statement: a run need not prepare data."""
        return [group for group in GROUPS if group != "data" and self.problem is None and not self.groups[group]]

    @property
    def start_changes(self) -> list[str]:
        """What has changed from one start to the next, besides the configuration."""
        changes = []
        for before, after in pairwise(start for start in self.starts if start.after is not None):
            found = differences([_of_start(before), _of_start(after)])
            when = f"after {'' if after.is_exact else 'about '}step {after.after}"
            changes += [f"{first_few(texts(group, keys), _SHOWN)} {when}" for group, keys in found.items()]
        return changes

    @classmethod
    def of(cls, path: Path, row: Row | None = None) -> ComparedRun:
        """Read a run directory, but for a `row` that is read already; what cannot be read is its `problem`."""
        run, row = RunDir(path), row or rows_of(path)[0]
        try:
            manifest, result = run.read_if_present(run.manifest), run.read_if_present(run.result) or {}
            digest = result.get("weights_sha256")
            return cls(
                row,
                provenance_of(run, manifest),
                starts_of(run, manifest),
                over_steps(periods_of(run, manifest)),
                digest if isinstance(digest, str) else None,
            )
        except RefusedError as error:
            return cls(row, problem=str(error))
        except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
            return cls(row, problem=f"its files are damaged: {' '.join(str(error).split())}")


@dataclass(frozen=True)
class RunsDiff:
    """Runs that are compared."""

    runs: Sequence[ComparedRun]

    @property
    def readable(self) -> list[ComparedRun]:
        """The runs that can be compared."""
        return [run for run in self.runs if run.problem is None]

    def groups(self) -> dict[str, dict[str, list[Any]]]:
        """Return the keys that differ by group, or have changed during a run, with a value of each readable run.

        A value that has changed during a run is a text with its steps.
        """
        runs = self.readable
        found: dict[str, dict[str, list[Any]]] = {}
        for group in GROUPS:
            recorded = [{group: run.groups[group]} for run in runs if run.groups[group]]
            differing = differences(recorded).get(group, {})
            # A run records the sizes of its sets with its first checkpoint.
            keys = dict.fromkeys(key for key in differing if not (key.endswith(SAMPLES) and MISSING in differing[key]))
            if group == "configuration":
                keys |= dict.fromkeys(key for run in runs for key in run.over_steps if key in run.groups[group])
            if keys:
                found[group] = {key: [_value(run, group, key) for run in runs] for key in keys}
        return found | self._starts()

    def _starts(self) -> dict[str, dict[str, list[Any]]]:
        """Return how often runs were started and where they were resumed, if any has more than one start."""
        runs = self.readable
        if all(len(run.starts) < 2 and not run.start_changes for run in runs):
            return {}
        later = [[start for start in run.starts[1:] if start.after is not None] for run in runs]
        resumed = [
            ", ".join(f"{'' if start.is_exact else 'about '}{start.after}" for start in starts) or MISSING
            for starts in later
        ]
        changes = ["; ".join(run.start_changes) or MISSING for run in runs]
        rows: dict[str, list[Any]] = {"starts": [len(run.starts) for run in runs], "resumed after step": resumed}
        return {"starts": rows | ({"changed": changes} if any(text is not MISSING for text in changes) else {})}

    def results(self) -> dict[str, list[Any]]:
        """Return the results of all runs, by name."""
        rows = [run.row for run in self.runs]
        names = dict.fromkeys(name for row in rows for name in row.metrics if not name.startswith("train/"))
        if not names:
            names = dict.fromkeys(name for row in rows for name in row.metrics)
        results: dict[str, list[Any]] = {"status": [row.status for row in rows], "step": [row.step for row in rows]}
        results |= {name: [row.metrics.get(name) for row in rows] for name in names}
        if any(run.row.best is not None for run in self.runs):
            results["best"] = [_best_text(run.row.best) for run in self.runs]
        results["weights"] = [None if (sha := run.weights_sha256) is None else sha[:_HASH] for run in self.runs]
        return results

    @property
    def has_equal_weights(self) -> bool | None:
        """Whether all runs have ended with the same weights, to the bit; None if that of one is not known."""
        digests = [run.weights_sha256 for run in self.runs]
        return None if None in digests else len(set(digests)) == 1

    def records(self) -> list[dict[str, Any]]:
        """Return a record for each key that differs and each result: `group`, `key`, and a value of each run."""
        columns = [str(run.row.path) for run in self.runs]
        unknown = dict.fromkeys(columns)
        readable = [str(run.row.path) for run in self.readable]
        found = [
            {
                "group": group,
                "key": key,
                **unknown,
                **dict(zip(readable, map(_plain, values), strict=True)),
            }
            for group, keys in self.groups().items()
            for key, values in keys.items()
        ]
        results = [
            {"group": "results", "key": key, **dict(zip(columns, values, strict=True))}
            for key, values in self.results().items()
        ]
        return [*found, *results]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for `--json`."""
        return {
            "runs": [_run_as_dict(run) for run in self.runs],
            "differences": {
                group: {key: list(map(_plain, values)) for key, values in keys.items()}
                for group, keys in self.groups().items()
            },
            "equal_weights": self.has_equal_weights,
        }


def compare_runs(paths: Sequence[Path]) -> RunsDiff:
    """Compare the runs in directories; nothing in them is changed, and no code that they name runs."""
    return RunsDiff([ComparedRun.of(path) for path in paths])


def _of_start(start: RunStart) -> dict[str, Mapping[str, Any]]:
    groups = provenance({}, start.facts)
    return {group: groups[group] for group in _OF_STARTS}


def _value(run: ComparedRun, group: str, key: str) -> Any:
    """Return the value of a key, or a text if it has changed during the run."""
    if group == "configuration" and key in run.over_steps:
        return spans(run.over_steps[key])
    return run.groups[group].get(key, MISSING)


def _plain(value: Any) -> Any:
    if value is MISSING:
        return None
    return value if isinstance(value, str | int | float | bool | list | None) else str(value)


def _best_text(best: Best | None) -> str | None:
    return None if best is None else f"{best.metric} {metric_text(best.metric, best.value)} at step {best.step}"


def _run_as_dict(run: ComparedRun) -> dict[str, Any]:
    return {
        **row_as_dict(run.row),
        "best": None if run.row.best is None else asdict(run.row.best),
        "weights_sha256": run.weights_sha256,
        "starts": [
            {"started": start.facts.get("started"), "after": start.after, "is_exact": start.is_exact}
            for start in run.starts
        ],
        "over_steps": {
            key: [{"after": one.after, "value": _plain(one.value), "is_exact": one.is_exact} for one in values]
            for key, values in run.over_steps.items()
        },
        "problem": run.problem,
    }


def cell(value: Any) -> str:
    """Return a value that differs as a cell of a table."""
    return "-" if value is MISSING else without_middle(value_text(value), _CELL)


def result_cell(name: str, value: Any) -> str:
    """Return a result as a cell of a table."""
    if isinstance(value, float) and "/" in name:
        return metric_text(name, finite(value))
    return "-" if value is None else str(value)
