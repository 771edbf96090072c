"""Which values differ between runs, and which values a key had over the steps of a run: functions of plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpexp.config.keys import MISSING


@dataclass(frozen=True)
class Period:
    """The steps of a run that one configuration has computed, up to the next one."""

    after: int  # the step that they follow; 0: from the beginning
    values: Mapping[str, Any]  # resolved, by key, as `flat` returns them
    is_exact: bool = True  # False: `after` is the last step that was recorded before; a few more may have followed


@dataclass(frozen=True)
class Value:
    """A value that a key had over some steps of a run."""

    after: int  # as of `Period`
    value: Any  # MISSING: the key was not there
    is_exact: bool = True


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a tree by their dotted keys; a list is one value, and an empty section has none."""
    return dict(_leaves(tree, prefix))


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def differing(runs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Return the keys whose values differ between runs, each with a value for every run; MISSING where it has none."""
    values = {
        key: tuple(run.get(key, MISSING) for run in runs) for key in dict.fromkeys(k for run in runs for k in run)
    }
    return {key: of_runs for key, of_runs in values.items() if any(not is_same(of_runs[0], other) for other in of_runs)}


def over_steps(periods: Sequence[Period]) -> dict[str, tuple[Value, ...]]:
    """Return the keys whose values have changed during a run, each with its values in the order of the steps."""
    changed: dict[str, tuple[Value, ...]] = {}
    for key in differing([period.values for period in periods]):
        values: list[Value] = []
        for period in periods:
            value = period.values.get(key, MISSING)
            if not values or not is_same(values[-1].value, value):
                values.append(Value(period.after, value, period.is_exact))
        changed[key] = tuple(values)
    return changed


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal as those of a configuration: 1 is 1.0, and true is not 1."""
    return isinstance(one, bool) is isinstance(other, bool) and bool(one == other)
